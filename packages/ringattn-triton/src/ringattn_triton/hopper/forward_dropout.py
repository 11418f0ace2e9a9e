# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Dropout in the forward pass on Hopper: a consumer draws one bit for each weight while its own products run.

A thread holds 64 weights of a tile of 128 keys: in rows `i` and `i + 8`, for keys `16 g + 2 l` and the next three of
`+ 1`, `+ 8`, `+ 9`, where `l` is its place among the four threads of a row and `g` counts groups of 16 keys. Its bits
are two words, one for each row. In a word, bytes 1, 0, 3, 2 belong to these four keys in this order, and bit `7 - g` of
each byte to group `g`. After a shift by `g`, the sign bits of the bytes are those of two pairs of neighbours, and one
instruction makes a mask for a pair of weights in half precision from two of them.

Entries share draws as in `dropout`. Where they cannot, each entry draws for itself, which takes four times as long.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.language.core import inline_asm_elementwise, int32

from ..kernels.dropout import philox
from ..kernels.tokens import first_counter
from .dropout import of_draws, own_draws
from .schedules import CONSUMER_ROWS
from .shared_numbers import read_number
from .softmax import quad_layout


@gluon.constexpr_function
def _of_bits():
    """The layout of a word for each of two rows that are 8 apart, `[32, 4]`: one word in each thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[CONSUMER_ROWS.value // 2, 4],
    )


@gluon.jit
def counter_of_queries(P, batch, row, NUMBER: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """The dropout counter of the first of a consumer's queries, or -1 if entries do not share draws; else 0."""
    if F.dropout:
        counter = first_counter(P.q_counters, batch, row, F.q_index_batch, F.q_length, PLAN.q_tile)
        return gl.where(counter < 0, counter, counter + NUMBER * (CONSUMER_ROWS // 2))
    else:
        return 0


@gluon.jit
def drawn(shared, taken, P, batch, start, counter, key, F: gl.constexpr, PLAN: gl.constexpr):
    """The two words of each thread for a tile, or zeros without dropout.

    The consumer's queries begin at row `start`; `counter` is from `counter_of_queries`.
    """
    if F.dropout:
        if counter < 0:
            tile = read_number(shared.tiles.index(taken % PLAN.stages), 4)
            first, second = _apart(P, batch, start, tile, key, F, PLAN.kv_tile)
        else:
            of_keys = read_number(shared.counters.index(taken % PLAN.stages), 4)
            first, second = _together(counter, of_keys, key, F, PLAN.kv_tile)
        return draws_first(first, second, taken), second
    else:
        return 0, 0


@builtin
def draws_first(first, second, step, _semantic=None):
    """Returns `first`, and keeps the assembler from drawing only after it has waited for the scores.

    It never places that wait before an earlier barrier instruction. So this adds an arrival that depends on the draws
    and is never executed, because no `step` is negative.
    """
    assembly = (
        "{ .reg .pred p; .reg .b32 x, y; or.b32 x, $1, $2; shr.s32 y, $3, 31; and.b32 x, x, y; setp.ne.s32 p, x, 0; "
        "@p bar.arrive 15, 288; mov.b32 $0, $1; }"
    )
    arguments = [first, second, step]
    return inline_asm_elementwise(assembly, "=r,r,r,r", arguments, int32, False, 1, _semantic=_semantic)


@gluon.jit
def _together(counter, of_keys, key, F: gl.constexpr, KV_TILE: gl.constexpr):
    """The words if four entries share a draw; the counters are those of the first query and of the first key."""
    rows = gl.arange(0, CONSUMER_ROWS // 2, gl.SliceLayout(1, of_draws(16)))[:, None]
    columns = gl.arange(0, 8, gl.SliceLayout(0, of_draws(16)))[None, :]
    upper = _no_bits()
    lower = _no_bits()
    for group in gl.static_range(KV_TILE // 16):
        first, second = philox(counter + rows, of_keys + (columns + group * 8), key, F)
        upper = _with_group(upper, first, F)
        lower = _with_group(lower, second, F)
    return _word(upper, KV_TILE), _word(lower, KV_TILE)


@gluon.jit
def _apart(P, batch, start, tile, key, F: gl.constexpr, KV_TILE: gl.constexpr):
    """The words if each entry draws for itself, as in a striped shard. A loop over groups keeps the code short."""
    rows = gl.arange(0, CONSUMER_ROWS // 2, gl.SliceLayout(1, of_draws(16)))[:, None]
    columns = gl.arange(0, 8, gl.SliceLayout(0, of_draws(16)))[None, :]
    i = start + (rows >> 3) * 16 + (rows & 7)
    upper = _no_bits()
    lower = _no_bits()
    for group in range(KV_TILE // 16):
        j = tile * KV_TILE + group * 16 + columns
        first, second = own_draws(P, batch, i, j, key, F)
        upper = _with_group(upper, first, F)
        lower = _with_group(lower, second, F)
    return _word(upper, KV_TILE), _word(lower, KV_TILE)


@gluon.jit
def _no_bits():
    """The bits of no group: those of the keys `16 g + 2 l`, and those of their neighbours."""
    nought = gl.zeros([CONSUMER_ROWS // 2, 4], gl.uint32, _of_bits())
    return nought, nought


@gluon.jit
def _with_group(bits, halves, F: gl.constexpr):
    """Appends to `bits` the bits of one more group of 16 keys.

    `halves` has two random 16-bit numbers in each word. Each decides whether dropout keeps one weight, and that bit is
    appended to a 16-bit half of `bits`.
    """
    BEFORE: gl.constexpr = (F.threshold - 1) * 0x10001
    BACK: gl.constexpr = (0x10000 - (F.threshold - 1)) % 0x10000 * 0x10001
    # Both halves at once: max(half, threshold - 1) - (threshold - 1) is 0 or more, then at most 1.
    keeps = gl.inline_asm_elementwise(
        "{.reg .b32 x; max.u16x2 x, $1, $2; add.u16x2 x, x, $3; min.u16x2 $0, x, $4;}", "=r,r,r,r,r",
        [halves, BEFORE, BACK, 0x10001], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip
    even, odd = gl.split(gl.reshape(keeps, [CONSUMER_ROWS // 2, 4, 2]))
    return bits[0] * 2 + gl.convert_layout(even, _of_bits()), bits[1] * 2 + gl.convert_layout(odd, _of_bits())


@gluon.jit
def _word(bits, KV_TILE: gl.constexpr):
    return (((bits[0] << 8) | bits[1]) << (8 - KV_TILE // 16)).to(gl.int32, bitcast=True)


@gluon.jit
def dropped(weights, bits, F: gl.constexpr, KV_TILE: gl.constexpr):
    """Packed weights (`softmax.packed`) after dropout."""
    if F.dropout:
        masks = gl.join(_masks(bits[0], KV_TILE), _masks(bits[1], KV_TILE))
        # Axes: 16 rows, rows of 8, threads of a row, pairs in a group, the bits of a group's number, the two rows.
        if KV_TILE == 128:
            parts = gl.reshape(masks, [CONSUMER_ROWS // 16, 8, 4, 2, 2, 2, 2, 2])
            ordered = gl.permute(parts, (0, 7, 1, 6, 5, 4, 3, 2))
        else:
            parts = gl.reshape(masks, [CONSUMER_ROWS // 16, 8, 4, 2, 2, 2, 2])
            ordered = gl.permute(parts, (0, 6, 1, 5, 4, 3, 2))
        HALF: gl.constexpr = KV_TILE // 2
        return weights & gl.convert_layout(gl.reshape(ordered, [CONSUMER_ROWS, HALF]), quad_layout(HALF))
    else:
        return weights


@gluon.jit
def _masks(word, KV_TILE: gl.constexpr):
    """The masks of a row's packed weights: a last axis for the pairs in a group, and one for each bit of its number."""
    if KV_TILE == 128:
        return gl.join(_of_groups(word, 0), _of_groups(word, 4))
    else:
        return _of_groups(word, 0)


@gluon.jit
def _of_groups(word, FIRST: gl.constexpr):
    """The masks of four groups."""
    two = gl.join(_of_group(word, FIRST), _of_group(word, FIRST + 1))
    return gl.join(two, gl.join(_of_group(word, FIRST + 2), _of_group(word, FIRST + 3)))


@gluon.jit
def _of_group(word, GROUP: gl.constexpr):
    """The masks of the two pairs of a group."""
    shifted = word << GROUP
    return gl.join(_signs(shifted, 0x8899), _signs(shifted, 0xAABB))


@gluon.jit
def _signs(word, WHICH: gl.constexpr):
    """A word of four masks: byte n is all ones where byte `d - 8` of `word` has its sign bit set, else 0.

    `d` is hexadecimal digit n of `WHICH`, the lowest first, as the PTX instruction `prmt` takes it.
    """
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [word, WHICH], dtype=gl.int32, is_pure=True, pack=1
    )
