# SPDX-License-Identifier: Apache-2.0
"""Decides which probabilities of a tile dropout keeps, on Hopper. The random numbers are computed before the scores.

Four entries take their bits from one draw, the two words of one Philox call: those of the global indices `(i, j)`,
`(i, j + 8)`, `(i + 8, j)` and `(i + 8, j + 8)` of query and key. Word 0 is for query `i`, word 1 for `i + 8`; the low
half of a word is for key `j`, the high half for `j + 8`. One thread holds all four entries in the result of a product,
and computes the draw once for them, if the indices of the tile's queries and keys are consecutive and begin at
multiples of 16. In a striped shard they are not, and the thread computes a draw for every entry. This is known only at
run time: the forward kernel has a copy of its loops for each case.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.dropout import half_of, philox
from ..kernels.tokens import first_counter, unsigned
from .layouts import CONSUMER_ROWS, draws_layout, product_layout


@gluon.jit
def counter_of_queries(P, batch, first_query, CONSUMER: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """The dropout counter of the first query of consumer `CONSUMER`: -1 if entries cannot share draws.

    `first_query` is that of the turn. The counter is 0 without dropout.
    """
    if F.dropout:
        counter = first_counter(P.q_counters, batch, first_query, F.q_index_batch, F.q_length, PLAN.q_tile)
        return gl.where(counter < 0, counter, counter + CONSUMER * (CONSUMER_ROWS // 2))
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
        i = _first_entry(start, rows)
        j = _first_entry(tile * KV_TILE, columns)
        word_0 = gl.zeros([CONSUMER_ROWS // 2, KV_TILE // 2], gl.uint32, draws_layout(KV_TILE))
        word_1 = word_0
        for number in range(4):  # a loop at run time, which needs fewer registers than `_own_draws`
            bits = _own_draw(P, batch, (i + number // 2 * 8)[:, None], (j + number % 2 * 8)[None, :], key, F)
            bits = bits << (number % 2 * 16)
            word_0 = word_0 | gl.where(number < 2, bits, 0)
            word_1 = word_1 | gl.where(number < 2, 0, bits)
        return word_0, word_1
    else:
        of_keys = first_counter(P.kv_counters, batch, tile * KV_TILE, F.kv_index_batch, F.kv_length, KV_TILE)
        return philox((counter + rows)[:, None], (of_keys + columns)[None, :], key, F)


@gluon.jit
def draws_by_keys(P, batch, q_start, kv_start, key, CONSUMER: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """The dropout bits of a consumer's tile in the backward pass, whose rows are keys: as `draws`, `[32, q_tile / 2]`.

    The tile begins at query `q_start` and at key `kv_start` of the block.
    """
    IN_DRAWS: gl.constexpr = draws_layout(PLAN.q_tile)
    rows = gl.arange(0, 32, gl.SliceLayout(1, IN_DRAWS))
    columns = gl.arange(0, PLAN.q_tile // 2, gl.SliceLayout(0, IN_DRAWS))
    of_queries = first_counter(P.q_counters, batch, q_start, F.q_index_batch, F.q_length, PLAN.q_tile)
    of_keys = first_counter(P.kv_counters, batch, kv_start, F.kv_index_batch, F.kv_length, PLAN.kv_tile)
    if (of_queries >= 0) & (of_keys >= 0):
        word_0, word_1 = philox((of_queries + columns)[None, :], (of_keys + CONSUMER * 32 + rows)[:, None], key, F)
    else:
        i = _first_entry(q_start, columns)[None, :]
        j = _first_entry(kv_start, rows)[:, None]
        word_0, word_1 = _own_draws(P, batch, i, j, key, F)
    return word_0, word_1


@gluon.jit
def _first_entry(start, draw):
    """The first of the two rows (or columns), 8 apart, that draw number `draw` of a tile from `start` on is for."""
    return start + (draw >> 3) * 16 + (draw & 7)


@gluon.jit
def _own_draws(P, batch, i, j, key, F: gl.constexpr):
    """The dropout bits of four entries, each from a draw of its own, put into two words as in a shared draw."""
    word_0 = _own_draw(P, batch, i, j, key, F) | (_own_draw(P, batch, i, j + 8, key, F) << 16)
    word_1 = _own_draw(P, batch, i + 8, j, key, F) | (_own_draw(P, batch, i + 8, j + 8, key, F) << 16)
    return word_0, word_1


@gluon.jit
def _own_draw(P, batch, query, key_number, key, F: gl.constexpr):
    """The 16 dropout bits of the pair of query `query` and key `key_number` of the block, from a draw of its own."""
    i = gl.load(P.q_index + (batch * F.q_index_batch + gl.minimum(query, F.q_length - 1)))
    j = gl.load(P.kv_index + (batch * F.kv_index_batch + gl.minimum(key_number, F.kv_length - 1)))
    return half_of(unsigned(i), unsigned(j), key, F)


@gluon.jit
def kept(word_0, word_1, F: gl.constexpr, COLUMNS: gl.constexpr, BY_KEYS: gl.constexpr = False):
    """Whether dropout keeps each entry of a tile of scores with `COLUMNS` columns, given the two words of each draw.

    `BY_KEYS`: the rows of the tile are keys.
    """
    # Each 16-bit half is compared as the upper half of a word. The lower half changes nothing: LEAST has zeros there.
    LEAST: gl.constexpr = F.threshold << 16
    in_word_0 = gl.join((word_0 << 16) >= LEAST, word_0 >= LEAST)
    in_word_1 = gl.join((word_1 << 16) >= LEAST, word_1 >= LEAST)
    four = gl.reshape(gl.join(in_word_0, in_word_1), [CONSUMER_ROWS // 16, 8, COLUMNS // 16, 8, 2, 2])
    # The halves of a word are for keys 8 apart, the words for queries 8 apart.
    ROWS: gl.constexpr = 4 if BY_KEYS else 5
    whole = gl.reshape(gl.permute(four, (0, ROWS, 1, 2, 9 - ROWS, 3)), [CONSUMER_ROWS, COLUMNS])
    return gl.convert_layout(whole, product_layout(COLUMNS))
