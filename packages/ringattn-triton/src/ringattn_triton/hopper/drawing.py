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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..kernels.dropout import half_of, philox
from ..kernels.tokens import first_counter, unsigned
from .handover import k_empty, leave, turn_empty, v_empty, wait_until_left
from .pipeline import got, next_turn, of_turn
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
def draw(shared, P, F: gl.constexpr, S: gl.constexpr):
    """Draws for every tile that the consumers take, in the same order."""
    CONSUMERS: gl.constexpr = S[0]
    KV_TILE: gl.constexpr = S[1]
    STAGES: gl.constexpr = S[2]
    TILE: gl.constexpr = CONSUMERS * CONSUMER_ROWS
    done = 0
    taken = 0
    row = next_turn(shared, done)
    while row >= 0:
        batch = of_turn(shared, done, 1)
        head = of_turn(shared, done, 2)
        tiles = of_turn(shared, done, 3) + of_turn(shared, done, 4)
        leave(turn_empty(S) + done % 2, S)
        key = gl.load(P.dropout_keys + (batch * F.heads + head))
        counter = first_counter(P.q_counters, batch, row, F.q_index_batch, F.q_length, TILE)
        for _ in range(0, tiles):
            place = taken % STAGES
            mbarrier.wait(shared.k_full.index(place), (taken // STAGES) & 1)
            tile = got(shared.tiles.index(place))
            leave(k_empty(S) + place, S)
            if S[11] & 8:
                word = gl.full([CONSUMER_ROWS // 2, 4], -1, gl.int32, of_bits()) - tile
                words = (word, word, word, word, word, word)
            elif counter < 0:
                words = _apart(P, batch, row, tile, key, F, CONSUMERS, KV_TILE)
            else:
                words = _together(P, batch, counter, tile, key, F, CONSUMERS, KV_TILE)
            # The words of a place have been read when its values have: a consumer takes these later.
            if taken >= STAGES:
                wait_until_left(v_empty(S) + place, S)
            for number in gl.static_range(2 * CONSUMERS):
                shared.bits.index(place * 2 * CONSUMERS + number).store(words[number])
            mbarrier.arrive(shared.bits_full.index(place), count=1)
            taken += 1
        done += 1
        row = next_turn(shared, done)


@gluon.jit
def _together(P, batch, counter, tile, key, F: gl.constexpr, CONSUMERS: gl.constexpr, KV_TILE: gl.constexpr):
    """The words of all consumers where four entries share a draw."""
    DRAWS: gl.constexpr = _of_draws()
    of_keys = first_counter(P.kv_counters, batch, tile * KV_TILE, F.kv_index_batch, F.kv_length, KV_TILE)
    columns = gl.arange(0, 8, gl.SliceLayout(0, DRAWS))
    words = ()
    for number in gl.static_range(CONSUMERS):
        rows = number * (CONSUMER_ROWS // 2) + gl.arange(0, CONSUMER_ROWS // 2, gl.SliceLayout(1, DRAWS))
        upper = _none()
        lower = _none()
        for group in gl.static_range(KV_TILE // 16):
            first, second = philox((counter + rows)[:, None], (of_keys + (columns + group * 8))[None, :], key, F)
            upper = _with_bits(upper, _survives(first, F))
            lower = _with_bits(lower, _survives(second, F))
        words += (_word(upper, KV_TILE), _word(lower, KV_TILE))
    return words


@gluon.jit
def _apart(P, batch, row, tile, key, F: gl.constexpr, CONSUMERS: gl.constexpr, KV_TILE: gl.constexpr):
    """The words of all consumers where each entry draws for itself, as in a striped shard."""
    DRAWS: gl.constexpr = _of_draws()
    columns = gl.arange(0, 8, gl.SliceLayout(0, DRAWS))
    rows = gl.arange(0, CONSUMER_ROWS // 2, gl.SliceLayout(1, DRAWS))
    words = ()
    for number in gl.static_range(2 * CONSUMERS):
        i = row + number // 2 * CONSUMER_ROWS + (rows >> 3) * 16 + (rows & 7) + number % 2 * 8
        q_index = gl.load(P.q_index + (batch * F.q_index_batch + gl.minimum(i, F.q_length - 1)))[:, None]
        word = _none()
        for group in gl.static_range(KV_TILE // 16):
            j = tile * KV_TILE + group * 16 + columns
            halves = _own_half(P, batch, q_index, j, key, F) | (_own_half(P, batch, q_index, j + 8, key, F) << 16)
            word = _with_bits(word, _survives(halves, F))
        words += (_word(word, KV_TILE),)
    return words


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
def _survives(halves, F: gl.constexpr):
    """For each half of a word 1 where it is not less than the threshold, else 0."""
    LEAST: gl.constexpr = (F.threshold - 1) * 0x10001
    MINUS: gl.constexpr = (0x10000 - (F.threshold - 1)) % 0x10000 * 0x10001
    return gl.inline_asm_elementwise(
        "{.reg .b32 more; max.u16x2 more, $1, $2; add.u16x2 more, more, $3; min.u16x2 $0, more, $4;}", "=r,r,r,r,r",
        [halves, LEAST, MINUS, 0x10001], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_bits(shared, taken, NUMBER: gl.constexpr, F: gl.constexpr, S: gl.constexpr):
    """Waits, as a consumer, for the two words of a tile; without dropout they are 0."""
    if F.dropout:
        place = taken % S[2]
        mbarrier.wait(shared.bits_full.index(place), (taken // S[2]) & 1)
        at = (place * S[0] + NUMBER) * 2
        return shared.bits.index(at).load(of_bits()), shared.bits.index(at + 1).load(of_bits())
    else:
        return 0, 0


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
