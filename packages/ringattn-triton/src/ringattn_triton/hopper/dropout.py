# SPDX-License-Identifier: Apache-2.0
"""Decides which probabilities of a tile dropout keeps, on Hopper. The random numbers are computed before the scores.

Four entries take their bits from one draw, the two words of one Philox call: those of the global indices `(i, j)`,
`(i, j + 8)`, `(i + 8, j)` and `(i + 8, j + 8)` of query and key. The first word is for query `i`, the second for
`i + 8`; the low half of a word is for key `j`, the high half for `j + 8`. One thread holds all four entries in the
result of a product, and computes the draw once for them, if the indices of the tile's queries and keys are consecutive
and begin at multiples of 16. In a striped shard they are not, and the thread computes a draw for every entry. This is
known only at run time: the forward kernel has a copy of its loops for each case.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.dropout import half_of, philox
from ..kernels.tokens import first_counter, unsigned
from .head_tiles import product_layout
from .plans import CONSUMER_ROWS


@gluon.constexpr_function
def draws_layout(KV_TILE):
    """The register layout of a tile's draws, `[32, KV_TILE / 2]`: each thread has the draws of the scores it holds."""
    columns = [1 << bit for bit in range(3, KV_TILE.bit_length() - 2)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, column] for column in columns)],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[CONSUMER_ROWS.value // 2, KV_TILE // 2],
    )


@gluon.jit
def counter_of_queries(P, batch, row, NUMBER: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """The dropout counter of the first query of consumer `NUMBER`: -1 if entries cannot share draws, 0 without dropout.

    `row` is the first query of the turn.
    """
    if F.dropout:
        counter = first_counter(P.q_counters, batch, row, F.q_index_batch, F.q_length, PLAN.q_tile)
        return gl.where(counter < 0, counter, counter + NUMBER * (CONSUMER_ROWS // 2))
    else:
        return 0


@gluon.jit
def draws(P, batch, start, tile, counter, key, OWN_DRAWS: gl.constexpr, F: gl.constexpr, KV_TILE: gl.constexpr):
    """The dropout bits of a consumer's tile in the forward pass: two arrays of words, each `[32, KV_TILE / 2]`.

    Every four entries have a word of each array. The consumer's queries begin at query `start` of the block, and
    `counter` is their `counter_of_queries`. If `OWN_DRAWS`, each entry has a draw of its own; its 16 bits go to the
    place in the two words that they would have in a shared draw.
    """
    rows = gl.arange(0, CONSUMER_ROWS // 2, gl.SliceLayout(1, draws_layout(KV_TILE)))
    columns = gl.arange(0, KV_TILE // 2, gl.SliceLayout(0, draws_layout(KV_TILE)))
    if OWN_DRAWS:
        i = start + (rows >> 3) * 16 + (rows & 7)
        j = tile * KV_TILE + (columns >> 3) * 16 + (columns & 7)
        first = gl.zeros([CONSUMER_ROWS // 2, KV_TILE // 2], gl.uint32, draws_layout(KV_TILE))
        second = first
        for number in range(4):  # a loop at run time, which needs fewer registers than `own_draws`
            bits = _own_draw(P, batch, (i + number // 2 * 8)[:, None], (j + number % 2 * 8)[None, :], key, F)
            bits = bits << (number % 2 * 16)
            first = first | gl.where(number < 2, bits, 0)
            second = second | gl.where(number < 2, 0, bits)
        return first, second
    else:
        of_keys = first_counter(P.kv_counters, batch, tile * KV_TILE, F.kv_index_batch, F.kv_length, KV_TILE)
        return philox((counter + rows)[:, None], (of_keys + columns)[None, :], key, F)


@gluon.jit
def own_draws(P, batch, i, j, key, F: gl.constexpr):
    """The dropout bits of four entries, each from a draw of its own, put into two words as in a shared draw."""
    first = _own_draw(P, batch, i, j, key, F) | (_own_draw(P, batch, i, j + 8, key, F) << 16)
    second = _own_draw(P, batch, i + 8, j, key, F) | (_own_draw(P, batch, i + 8, j + 8, key, F) << 16)
    return first, second


@gluon.jit
def _own_draw(P, batch, query, key_number, key, F: gl.constexpr):
    """The 16 dropout bits of the pair of query `query` and key `key_number` of the block, from a draw of its own."""
    i = gl.load(P.q_index + (batch * F.q_index_batch + gl.minimum(query, F.q_length - 1)))
    j = gl.load(P.kv_index + (batch * F.kv_index_batch + gl.minimum(key_number, F.kv_length - 1)))
    return half_of(unsigned(i), unsigned(j), key, F)


@gluon.jit
def kept(first, second, F: gl.constexpr, COLUMNS: gl.constexpr, BY_KEYS: gl.constexpr = False):
    """Whether dropout keeps each entry of a tile of scores, given `first` and `second`, the two words of each draw.

    The tile has `COLUMNS` columns. `BY_KEYS`: its rows are keys.
    """
    # Each 16-bit half is compared as the upper half of a word. The lower half changes nothing: LEAST has zeros there.
    LEAST: gl.constexpr = F.threshold << 16
    in_first = gl.join((first << 16) >= LEAST, first >= LEAST)
    in_second = gl.join((second << 16) >= LEAST, second >= LEAST)
    four = gl.reshape(gl.join(in_first, in_second), [CONSUMER_ROWS // 16, 8, COLUMNS // 16, 8, 2, 2])
    # The halves of a word are for keys 8 apart, the words for queries 8 apart.
    ROWS: gl.constexpr = 4 if BY_KEYS else 5
    whole = gl.reshape(gl.permute(four, (0, ROWS, 1, 2, 9 - ROWS, 3)), [CONSUMER_ROWS, COLUMNS])
    return gl.convert_layout(whole, product_layout(COLUMNS))
