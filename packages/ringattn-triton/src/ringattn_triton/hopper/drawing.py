# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Dropout in the forward pass on Hopper: four warps, the drawers, draw for the consumers, one tile ahead of them.

A consumer's thread has 64 weights of a tile of 128 keys. Its drawer computes the same 16 Philox calls that the thread
would need, and leaves one bit for each weight in shared memory: two words, one for row `i` and one for row `i + 8`.
In a word, byte 3 belongs to the keys `j + 8`, of which byte 2 has the next neighbours `j + 9`, byte 1 to the keys `j`,
and byte 0 to `j + 1`. Bit 7 - g of a byte is for keys `j = 16 g + 2 l`, where `l` is the thread's place among the four
that share a row. So the sign bits of the bytes, shifted by g, are those of two pairs of neighbours.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.language.core import inline_asm_elementwise, int32

from ..kernels.dropout import half_of, philox
from ..kernels.tokens import first_counter, unsigned
from .pipeline import got
from .schedules import CONSUMER_ROWS
from .softmax import of_words


@gluon.constexpr_function
def of_bits():
    """The layout of the words of a consumer's 64 rows, `[32, 4]`: one in each thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[CONSUMER_ROWS.value // 2, 4],
    )


@gluon.constexpr_function
def _of_draws():
    """The layout of the draws for 16 keys, `[32, 8]`: each thread has the draws of two neighbours."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[CONSUMER_ROWS.value // 2, 8],
    )


@gluon.jit
def drawn(shared, taken, P, batch, start, counter, key, F: gl.constexpr, S: gl.constexpr):
    """The two words of a tile, in a consumer whose 64 queries begin at row `start`; without dropout they are 0.

    `counter` is the dropout counter of the first query, or -1 if entries do not share draws.
    """
    if F.dropout:
        if counter < 0:
            tile = got(shared.tiles.index(taken % S[2]))
            first, second = _apart(P, batch, start, tile, key, F, S[1])
        else:
            of_keys = got(shared.counters.index(taken % S[2]))
            first, second = _together(counter, of_keys, key, F, S[1], S[11])
        if S[11] & 32 == 0:
            first = draws_first(first, second, taken)
        return first, second
    else:
        return 0, 0


@builtin
def draws_first(first, second, step, _semantic=None):
    """Returns `first`, and keeps the assembler from drawing only after it has waited for the scores.

    It does not place a wait before an earlier barrier instruction. So this adds an arrival that depends on the draws
    and is never executed, because no `step` is negative.
    """
    assembly = (
        "{ .reg .pred p; .reg .b32 x, y; or.b32 x, $1, $2; shr.s32 y, $3, 31; and.b32 x, x, y; setp.ne.s32 p, x, 0; "
        "@p bar.arrive 15, 288; mov.b32 $0, $1; }"
    )
    arguments = [first, second, step]
    return inline_asm_elementwise(assembly, "=r,r,r,r", arguments, int32, False, 1, _semantic=_semantic)


@gluon.jit
def _together(counter, of_keys, key, F: gl.constexpr, KV_TILE: gl.constexpr, HOW: gl.constexpr = 0):
    """The words where four entries share a draw."""
    DRAWS: gl.constexpr = _of_draws()
    columns = gl.arange(0, 8, gl.SliceLayout(0, DRAWS))
    rows = gl.arange(0, CONSUMER_ROWS // 2, gl.SliceLayout(1, DRAWS))
    upper = _none()
    lower = _none()
    for group in gl.static_range(KV_TILE // 16):
        if HOW & 256:
            first, second = _philox((counter + rows)[:, None], (of_keys + (columns + group * 8))[None, :], key)
        else:
            first, second = philox((counter + rows)[:, None], (of_keys + (columns + group * 8))[None, :], key, F)
        upper = _with_bits(upper, _survives(first, F, HOW))
        lower = _with_bits(lower, _survives(second, F, HOW))
    return _word(upper, KV_TILE), _word(lower, KV_TILE)


@gluon.jit
def _apart(P, batch, start, tile, key, F: gl.constexpr, KV_TILE: gl.constexpr):
    """The words where each entry draws for itself, as in a striped shard."""
    DRAWS: gl.constexpr = _of_draws()
    columns = gl.arange(0, 8, gl.SliceLayout(0, DRAWS))
    rows = gl.arange(0, CONSUMER_ROWS // 2, gl.SliceLayout(1, DRAWS))
    words = ()
    for number in gl.static_range(2):
        i = start + (rows >> 3) * 16 + (rows & 7) + number * 8
        q_index = gl.load(P.q_index + (batch * F.q_index_batch + gl.minimum(i, F.q_length - 1)))[:, None]
        word = _none()
        for group in range(KV_TILE // 16):
            j = tile * KV_TILE + group * 16 + columns
            halves = _own_half(P, batch, q_index, j, key, F) | (_own_half(P, batch, q_index, j + 8, key, F) << 16)
            word = _with_bits(word, _survives(halves, F))
        words += (_word(word, KV_TILE),)
    return words[0], words[1]


@gluon.jit
def _own_half(P, batch, q_index, column, key, F: gl.constexpr):
    """The 16 bits of these queries and keys, which are broadcast against each other."""
    j = gl.load(P.kv_index + (batch * F.kv_index_batch + gl.minimum(column, F.kv_length - 1)))[None, :]
    return half_of(unsigned(q_index), unsigned(j), key, F)


@gluon.jit
def _none():
    return gl.zeros([CONSUMER_ROWS // 2, 4], gl.uint32, of_bits()), gl.zeros([CONSUMER_ROWS // 2, 4], gl.uint32, of_bits())


@gluon.jit
def _with_bits(bits, more):
    """Appends bits of 16 more keys to those of even and of odd keys."""
    even, odd = gl.split(gl.reshape(more, [CONSUMER_ROWS // 2, 4, 2]))
    return bits[0] * 2 + gl.convert_layout(even, of_bits()), bits[1] * 2 + gl.convert_layout(odd, of_bits())


@gluon.jit
def _word(bits, KV_TILE: gl.constexpr):
    return (((bits[0] << 8) | bits[1]) << (8 - KV_TILE // 16)).to(gl.int32, bitcast=True)


@gluon.jit
def _philox(a, b, key):
    a = a.to(gl.uint32)
    b = b.to(gl.uint32)
    for _ in gl.static_range(7):
        high = gl.inline_asm_elementwise("mul.hi.u32 $0, $1, $2;", "=r,r,r", [a, 0xD256D193], dtype=gl.uint32, is_pure=True, pack=1)
        low = gl.inline_asm_elementwise("mul.lo.u32 $0, $1, $2;", "=r,r,r", [a, 0xD256D193], dtype=gl.uint32, is_pure=True, pack=1)
        a = high ^ key ^ b
        b = low
        key = key + 0x9E3779B9
    return a, b


@gluon.jit
def _survives(halves, F: gl.constexpr, HOW: gl.constexpr = 0):
    """For each half of a word 1 where it is not less than the threshold, else 0."""
    if HOW & 64:
        LOW: gl.constexpr = F.threshold << 16
        return gl.where((halves << 16) >= LOW, 1, 0).to(gl.uint32) | gl.where(halves >= LOW, 0x10000, 0).to(gl.uint32)
    LEAST: gl.constexpr = (F.threshold - 1) * 0x10001
    MINUS: gl.constexpr = (0x10000 - (F.threshold - 1)) % 0x10000 * 0x10001
    return gl.inline_asm_elementwise(
        "{.reg .b32 more; max.u16x2 more, $1, $2; add.u16x2 more, more, $3; min.u16x2 $0, more, $4;}", "=r,r,r,r,r",
        [halves, LEAST, MINUS, 0x10001], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def dropped(weights, bits, F: gl.constexpr, S: gl.constexpr):
    """Packed weights (`softmax.packed`) after dropout."""
    if F.dropout:
        whole = gl.join(_masks(bits[0], S[1]), _masks(bits[1], S[1]))
        GROUPS: gl.constexpr = S[1] // 16
        if GROUPS == 8:
            parts = gl.reshape(whole, [CONSUMER_ROWS // 16, 8, 4, 2, 2, 2, 2, 2])
            ordered = gl.permute(parts, (0, 7, 1, 6, 5, 4, 3, 2))
        else:
            parts = gl.reshape(whole, [CONSUMER_ROWS // 16, 8, 4, 2, 2, 2, 2])
            ordered = gl.permute(parts, (0, 6, 1, 5, 4, 3, 2))
        return weights & gl.convert_layout(gl.reshape(ordered, [CONSUMER_ROWS, S[1] // 2]), of_words(S[1]))
    else:
        return weights


@gluon.jit
def _masks(word, KV_TILE: gl.constexpr):
    """The masks of packed weights of a row: axes of its threads, of halves of 16 keys, and of groups in binary."""
    if KV_TILE == 128:
        return gl.join(_of_groups(word, 0), _of_groups(word, 4))
    else:
        return _of_groups(word, 0)


@gluon.jit
def _of_groups(word, FIRST: gl.constexpr):
    two = gl.join(_of_group(word, FIRST), _of_group(word, FIRST + 1))
    return gl.join(two, gl.join(_of_group(word, FIRST + 2), _of_group(word, FIRST + 3)))


@gluon.jit
def _of_group(word, GROUP: gl.constexpr):
    shifted = word << GROUP
    return gl.join(_signs(shifted, 0x8899), _signs(shifted, 0xAABB))


@gluon.jit
def _signs(word, WHICH: gl.constexpr):
    """Four copies of sign bits of bytes: of the byte that each digit of `WHICH` names, less 8."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [word, WHICH], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def counter_of_queries(P, batch, row, NUMBER: gl.constexpr, F: gl.constexpr, S: gl.constexpr):
    """The dropout counter of the first of a consumer's queries, or -1 if entries do not share draws; else 0."""
    if F.dropout:
        counter = first_counter(P.q_counters, batch, row, F.q_index_batch, F.q_length, S[0] * CONSUMER_ROWS)
        return gl.where(counter < 0, counter, counter + NUMBER * (CONSUMER_ROWS // 2))
    else:
        return 0
