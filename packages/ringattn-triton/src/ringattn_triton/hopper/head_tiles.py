# SPDX-License-Identifier: Apache-2.0
"""How a head whose size is a multiple of 8 lies in shared memory: in one or two pieces, which TMA fills up with zeros.

The width of a piece is a power of two. Most heads are one piece. A head of 136 to 192 is two pieces, of 128 and 64:
padding to 256 would take a third more of shared memory. A product over the dimensions of a head is a sum of products,
one for each power of two in the head size, and accumulators (`sums`) may divide a head in yet another way:

| head size | pieces | products (`product_dims`) | accumulators |
|---|---|---|---|
| 64, 128, 256 | one | one | one |
| 72 | 128 | 64, 16 | 64, 16 |
| 96 | 128 | 64, 32 | 64, 32 |
| 104, 112 | 128 | 64, 32, 16 | 128 |
| 136 | 128, 64 | 128, 16 | 128, 32 |
| 160 | 128, 64 | 128, 32 | 128, 32 |
| 192 | 128, 64 | 128, 64 | 128, 64 |
| 208 | 256 | 128, 64, 16 | 256 |

Global memory has no padding. A descriptor has an axis for heads, so that TMA sees where a head ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma

from .layouts import CONSUMER_ROWS, product_layout
from .workarounds import fetch


@gluon.constexpr_function
def product_count(dim):
    """How many products `product_of_heads` computes: one for each power of two in `dim`, rounded up to 16s."""
    return (-(-dim // 16)).bit_count()


@gluon.constexpr_function
def product_dims(dim, number):
    """The first dimension that product `number` of a head covers, and the number of dimensions; largest first."""
    first, rest = 0, -(-dim // 16) * 16
    for _ in range(number):
        width = 1 << (rest.bit_length() - 1)
        first, rest = first + width, rest - width
    return first, 1 << (rest.bit_length() - 1)


@gluon.constexpr_function
def in_two_pieces(dim):
    """Whether a head of `dim` dimensions lies in shared memory as two pieces, of 128 and 64, allocated apart."""
    return 128 < dim <= 192


@gluon.constexpr_function
def stored_width(dim, number):
    """How many dimensions, with padding, piece `number` of a head of `dim` dimensions has in shared memory."""
    return (128, 64)[number] if in_two_pieces(dim) else max(16, 1 << (dim - 1).bit_length())


@gluon.constexpr_function
def padded_size(dim):
    """The head size `dim` rounded up to a power of two, or to 192 where the head lies in two pieces."""
    return stored_width(dim, 0) + (stored_width(dim, 1) if in_two_pieces(dim) else 0)


@gluon.jit
def stages_of_heads(TYPE: gl.constexpr, COUNT: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Allocates shared memory for tiles of `ROWS` tokens of a head: an array of stages for each piece of the head.

    There are `COUNT` stages for the first piece, and `REST` stages for the second piece, if the head has two.
    """
    stages = (stages_of_tiles(TYPE, COUNT, ROWS, stored_width(DIM, 0)),)
    if in_two_pieces(DIM):
        stages += (stages_of_tiles(TYPE, REST, ROWS, stored_width(DIM, 1)),)
    return stages


@gluon.jit
def stages_of_tiles(TYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Allocates `COUNT` stages in shared memory for tiles `[ROWS, WIDTH]`, swizzled as TMA and products need it."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], TYPE)
    return gl.allocate_shared_memory(TYPE, [COUNT, ROWS, WIDTH], LAYOUT)


@gluon.jit
def stage_of(stages, stage):
    """Stage `stage` of an allocation by `stages_of_heads`, as a tuple of the head's pieces."""
    found = ()
    for number in gl.static_range(len(stages)):
        found += (stages[number].index(stage),)
    return found


@gluon.jit
def tiles_of_heads(
    base, HEADS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, HEAD: gl.constexpr, TOKEN: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """TMA descriptors of the array `[HEADS, ROWS, DIM]` at `base`, one for each piece of a head.

    `HEAD` and `TOKEN` are the strides of its first two axes. A tile is `[1, TILE, width of the piece]`.
    """
    found = ()
    for number in gl.static_range(2 if in_two_pieces(DIM) else 1):
        found += (_tiles_of_piece(base, HEADS, ROWS, DIM, HEAD, TOKEN, TILE, stored_width(DIM, number)),)
    return found


@gluon.jit
def _tiles_of_piece(
    base, HEADS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, HEAD: gl.constexpr, TOKEN: gl.constexpr,
    TILE: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """A TMA descriptor of `[HEADS, ROWS, DIM]` at `base`, strides `[HEAD, TOKEN, 1]`, tiles `[1, TILE, WIDTH]`."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, TILE, WIDTH], base.dtype.element_ty)
    return tma.make_tensor_descriptor(base, [HEADS, ROWS, DIM], [HEAD, TOKEN, 1], [1, TILE, WIDTH], LAYOUT)


@gluon.jit
def tiles_of_results(base, BATCH: gl.constexpr, LENGTH: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr):
    """A TMA descriptor of results `[BATCH, LENGTH, HEADS, DIM]`; a tile is 64 tokens of a head, which is one piece."""
    WIDTH: gl.constexpr = stored_width(DIM, 0)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, CONSUMER_ROWS, WIDTH], base.dtype.element_ty)
    TOKEN: gl.constexpr = HEADS * DIM
    return tma.make_tensor_descriptor(
        base, [BATCH, HEADS, LENGTH, DIM], [LENGTH * TOKEN, DIM, TOKEN, 1], [1, 1, CONSUMER_ROWS, WIDTH], LAYOUT
    )  # fmt: skip


@gluon.jit
def tiles_of_bias(bias, BATCH: gl.constexpr, F: gl.constexpr, Q_TILE: gl.constexpr, KV_TILE: gl.constexpr):
    """A TMA descriptor of the bias as `[groups, queries, keys]`; TMA fills tiles at the end up with zeros.

    A group is the bias of one batch row and head (`shared_group`).
    """
    GROUPS: gl.constexpr = (BATCH if F.bias_batch else 1) * (F.heads if F.bias_head else 1)
    SIZE: gl.constexpr = F.q_length * F.kv_length
    return _tiles_of_piece(bias, GROUPS, F.q_length, F.kv_length, SIZE, F.kv_length, Q_TILE, KV_TILE)


@gluon.jit
def shared_group(batch, head, BY_BATCH: gl.constexpr, BY_HEAD: gl.constexpr, HEADS: gl.constexpr):
    """The number of the group of a batch row and head; those that share an array's row share a group."""
    group = batch * 0  # a scalar at run time
    if BY_BATCH:
        group = batch * (HEADS if BY_HEAD else 1)
    if BY_HEAD:
        group = group + head
    return group


@gluon.jit
def fetch_heads(tiles, head, token, full, stage):
    """Begins to fetch a tile, from token `token` of `head` on, into `stage`; its bytes arrive at barrier `full`."""
    for number in gl.static_range(len(tiles)):
        fetch_piece(tiles, head, token, full, stage[number], number)


@gluon.jit
def fetch_piece(tiles, head, token, full, stage, NUMBER: gl.constexpr):
    """Begins to fetch piece `NUMBER` of a tile into `stage`; the other arguments are those of `fetch_heads`."""
    fetch(tiles[NUMBER], [head, token, NUMBER * 128], full, stage.reshape((1, stage.shape[0], stage.shape[1])))


@gluon.jit
def product_of_heads(left, right, DIM: gl.constexpr):
    """Begins `left right^T` of two tiles over the `DIM` dimensions of a head, as `product_count` products."""
    COLUMNS: gl.constexpr = right[0].shape[0]
    product = gl.zeros([CONSUMER_ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    for number in gl.static_range(product_count(DIM)):
        rows = dims_of(left, product_dims(DIM, number)[0], product_dims(DIM, number)[1])
        columns = dims_of(right, product_dims(DIM, number)[0], product_dims(DIM, number)[1]).permute((1, 0))
        product = warpgroup_mma(rows, columns, product, use_acc=number > 0, is_async=True)
    return product


@gluon.jit
def dims_of(rows, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """The `WIDTH` dimensions from `FIRST` on of the tile `rows`; they must lie in one of its pieces."""
    SECOND: gl.constexpr = len(rows) == 2 and FIRST >= 128
    piece = rows[1] if SECOND else rows[0]
    if piece.shape[1] == WIDTH:
        return piece
    else:
        return piece.slice(FIRST - 128 if SECOND else FIRST, WIDTH, dim=1)


@gluon.jit
def tile_offsets(
    start, batch, head, LENGTH: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, FIRST: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The offsets of a `[64, WIDTH]` tile in an array `[B, LENGTH, HEADS, DIM]`.

    The tile is 64 tokens from `start` on and `WIDTH` dimensions from `FIRST` on, of one batch row and head. The second
    result says which offsets are inside the array.
    """
    tokens = start + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, LAYOUT))
    dims = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = (batch.to(gl.int64) * LENGTH + tokens)[:, None] * (HEADS * DIM)
    within = (tokens < LENGTH)[:, None]
    if DIM < FIRST + WIDTH:
        within = within & (dims < DIM)[None, :]
    return at + head * DIM + dims[None, :], within
