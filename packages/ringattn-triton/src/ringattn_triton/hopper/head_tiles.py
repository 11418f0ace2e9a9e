# SPDX-License-Identifier: Apache-2.0
"""How a head whose size is a multiple of 8 lies in shared memory: in one or two pieces, which TMA fills up with zeros.

The width of a piece is a power of two. Most heads are one piece. A head of 136 to 192 is two pieces, of 128 and 64:
padding to 256 would take a third more of shared memory.

Global memory has no padding. A descriptor has an axis for heads, so that TMA sees where a head ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma

from .workarounds import fetch


@gluon.constexpr_function
def product_count(dim):
    """How many products `product_of_heads` computes: one for each power of two in `dim`, rounded up to 16s."""
    return (-(-dim // 16)).bit_count()


@gluon.constexpr_function
def piece(dim, number):
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
    """Allocates shared memory for tiles of `ROWS` tokens of a head: an array of places for each piece of the head.

    There are `COUNT` places for the first piece, and `REST` places for the second piece, if the head has two.
    """
    places = (stages_of_tiles(TYPE, COUNT, ROWS, stored_width(DIM, 0)),)
    if in_two_pieces(DIM):
        places += (stages_of_tiles(TYPE, REST, ROWS, stored_width(DIM, 1)),)
    return places


@gluon.jit
def stages_of_tiles(TYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], TYPE)
    return gl.allocate_shared_memory(TYPE, [COUNT, ROWS, WIDTH], LAYOUT)


@gluon.jit
def stage_of(places, number):
    """Place `number` of an allocation by `stages_of_heads`, as a tuple of the head's pieces."""
    found = ()
    for one in gl.static_range(len(places)):
        found += (places[one].index(number),)
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
        found += (tiles_of_piece(base, HEADS, ROWS, DIM, HEAD, TOKEN, TILE, stored_width(DIM, number)),)
    return found


@gluon.jit
def tiles_of_piece(
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
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 64, WIDTH], base.dtype.element_ty)
    TOKEN: gl.constexpr = HEADS * DIM
    return tma.make_tensor_descriptor(
        base, [BATCH, HEADS, LENGTH, DIM], [LENGTH * TOKEN, DIM, TOKEN, 1], [1, 1, 64, WIDTH], LAYOUT
    )  # fmt: skip


@gluon.jit
def fetch_heads(tiles, head, row, full, place):
    """Begins to fetch a tile, from token `row` of `head` on, into `place`; its bytes arrive at barrier `full`."""
    for number in gl.static_range(len(tiles)):
        fetch_piece(tiles, head, row, full, place[number], number)


@gluon.jit
def fetch_piece(tiles, head, row, full, place, NUMBER: gl.constexpr):
    """Begins to fetch piece `NUMBER` of a tile into `place`; the other arguments are those of `fetch_heads`."""
    fetch(tiles[NUMBER], [head, row, NUMBER * 128], full, place.reshape((1, place.shape[0], place.shape[1])))


@gluon.constexpr_function
def product_layout(columns):
    """The register layout of a product of one warpgroup: 64 rows by `columns` columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def row_layout(columns):
    """The register layout of one number for each row of a product with the layout `product_layout(columns)`."""
    return gl.SliceLayout(1, product_layout(columns))


@gluon.constexpr_function
def left_layout(columns):
    """The register layout of the left operand of a product with the layout `product_layout(columns)`."""
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(columns), k_width=2)


@gluon.jit
def product_of_heads(left, right, nought, DIM: gl.constexpr):
    """Begins `left right^T` of two tiles over the `DIM` dimensions of a head, as `product_count` products."""
    product = nought
    for number in gl.static_range(product_count(DIM)):
        rows = dims_of(left, piece(DIM, number)[0], piece(DIM, number)[1])
        columns = dims_of(right, piece(DIM, number)[0], piece(DIM, number)[1]).permute((1, 0))
        product = warpgroup_mma(rows, columns, product, use_acc=piece(DIM, number)[0] > 0, is_async=True)
    return product


@gluon.jit
def dims_of(rows, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """The `WIDTH` dimensions from `FIRST` on of the tile `rows`; they must lie in one of its pieces."""
    SECOND: gl.constexpr = len(rows) == 2 and FIRST >= 128
    part = rows[1] if SECOND else rows[0]
    if part.shape[1] == WIDTH:
        return part
    else:
        return part.slice(FIRST - 128 if SECOND else FIRST, WIDTH, dim=1)
