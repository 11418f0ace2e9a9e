# SPDX-License-Identifier: Apache-2.0
"""Masks, soft cap, ALiBi and dropout of a tile of scores in the one-pass backward. The rows of a tile are keys."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.dropout import philox
from ..kernels.scores import LOG2_E, bent, biased, lost_by_distance
from ..kernels.tile_loop import owned
from ..kernels.tokens import Queries, first_counter, of_columns, visible
from .backward_memory import first_place, read
from .dropout import draws_layout, kept, own_draws
from .forward_softmax import quad_layout, quad_sums
from .head_tiles import product_layout, row_layout


class Tile(NamedTuple):
    """What a step reads for its tile of scores beside q, k, v and dout; a field is 0 where the options do not need it.

    `rows`: the memory of that name, from which numbers of queries are read just before they are used, to save
    registers; `place`: the place of the step's queries. `away`: the position of each key minus that of the tile's first
    query, float32, for distances; exact up to 2^24. `first`, `second`: the two words of each dropout draw. `bits`: a
    packed mask, 16 keys in each number.
    """

    rows: Any
    place: Any
    head: Any
    keys: Any
    away: Any
    first: Any
    second: Any
    bits: Any
    bias: Any


@gluon.jit
def tile_of(
    shared, place, P, turn, head, NUMBER: gl.constexpr, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Loads the `Tile` of the queries in `place` and of consumer `NUMBER`'s 64 keys of a turn."""
    OF_KEYS: gl.constexpr = row_layout(PLAN.q_tile)
    keys = 0
    away = 0
    first = 0
    second = 0
    bits = 0
    bias = 0
    if MASKED or F.distances or F.dropout:
        row, batch, _ = owned(turn, T, F.kv_heads)
        q_start = read(shared, "tile", place) * PLAN.q_tile
        kv_start = row * PLAN.kv_tile
        if MASKED:
            columns = NUMBER * 64 + gl.arange(0, 64, OF_KEYS)
            keys = of_columns(P, batch, kv_start, columns, 0, F, PLAN.kv_tile, True)
        if F.distances:
            column = kv_start + NUMBER * 64 + gl.arange(0, 64, OF_KEYS)
            if F.kv_length % PLAN.kv_tile != 0:
                column = gl.minimum(column, F.kv_length - 1)
            found = gl.load(P.kv_positions + (batch * F.kv_positions_batch + column))
            origin = gl.load(P.q_positions + (batch * F.q_positions_batch + q_start))
            away = (found - origin).to(gl.float32)[:, None]
        if F.dropout:
            first, second = _draws(P, batch, q_start, kv_start + NUMBER * 64, head.dropout_key, NUMBER, F, PLAN)
        if MASKED and F.masks:
            bits = _mask_bits(head.mask_words, q_start, kv_start + NUMBER * 64, F, PLAN)
    if F.bias:
        bias = shared.bias.index(place).slice(NUMBER * 64, 64, dim=1).permute((1, 0)).load(product_layout(PLAN.q_tile))
    return Tile(shared.rows, place, head, keys, away, first, second, bits, bias)


@gluon.jit
def probabilities(s, tile, F: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr):
    """Two results: the weights `p` after dropout, without the factor `1 / (1 - dropout)`, and `steep` for
    `score_gradients`.

    `steep` is `p` before dropout times the derivative of the soft cap, with a minus sign where dropout drops the entry.
    """
    FOLD: gl.constexpr = F.unbend * LOG2_E
    bent_product = bent(s, F)
    lse = 0.0
    if not PLAN.subtracting:
        lse = load_query_values("lse", tile.rows, tile.place, PLAN)
    if F.bias:
        p = gl.exp2(biased(bent_product * F.unbend, tile.bias) * LOG2_E - lse)
    elif F.distances:
        lost = lost_by_distance(tile.head, F, False)
        p = gl.exp2(bent_product * FOLD - lse - (lost * LOG2_E) * _distance(tile, PLAN))
    else:
        p = gl.exp2(bent_product * FOLD - lse)
    if MASKED:  # rows past the end have lse +inf
        UNMASKED: gl.constexpr = F.without_masks
        RAGGED: gl.constexpr = F.kv_length % PLAN.kv_tile != 0
        seen = visible(_queries(tile, F, PLAN), tile.keys, tile.head, UNMASKED, RAGGED, False)
        if F.masks:
            seen = seen & _spread(tile.bits, PLAN.q_tile, F.grain)
        p = gl.where(seen, p, 0.0)
    if F.dropout:
        p = gl.where(kept(tile.first, tile.second, F, PLAN.q_tile, True), p, -p)
    steep = p
    if F.capped:
        steep = p * (1.0 - bent_product * bent_product)
    if F.dropout:
        p = gl.maximum(p, 0.0)
    return p, steep


@gluon.jit
def _queries(tile, F: gl.constexpr, PLAN: gl.constexpr):
    """The `Queries` that masks need."""
    low = 0
    high = 0
    segment = 0
    if F.below:
        low = load_query_values("first", tile.rows, tile.place, PLAN).to(gl.int32, bitcast=True)
    if F.above:
        high = load_query_values("last", tile.rows, tile.place, PLAN).to(gl.int32, bitcast=True)
    if F.segments:
        segment = load_query_values("segment", tile.rows, tile.place, PLAN).to(gl.int32, bitcast=True)
    return Queries(0, 0, low, high, 0, 0, segment)


@gluon.jit
def load_query_values(KIND: gl.constexpr, rows, place, PLAN: gl.constexpr):
    """Reads the numbers of kind `KIND` (`first_place`) of the queries in `place`, as a row of a tile of scores."""
    return rows.index(first_place(KIND, PLAN) + place).load(product_layout(PLAN.q_tile))


@gluon.jit
def score_gradients(steep, dp, tile, F: gl.constexpr, PLAN: gl.constexpr):
    """The gradient of the scores, or with a soft cap that of the products `q k`. `steep`: see `probabilities`.

    `dp` is `dout v`, from which delta is subtracted already if `PLAN.subtracting`.
    """
    if PLAN.subtracting:
        return steep * dp
    else:
        minus_delta = load_query_values("delta", tile.rows, tile.place, PLAN)
        if F.dropout:
            return gl.abs(steep) * gl.where(steep > 0.0, dp * F.keep_weight + minus_delta, minus_delta)
        else:
            return steep * (dp + minus_delta)


@gluon.jit
def head_sums(F: gl.constexpr):
    """What `with_head_sums` starts from: zeros, or the constant 0 if no ALiBi slopes are differentiated."""
    if F.per_head_gradient:
        return gl.zeros([64, 4], gl.float32, quad_layout(4))
    else:
        return 0


@gluon.jit
def with_head_sums(sums, ds, tile, F: gl.constexpr, PLAN: gl.constexpr):
    """Adds a tile's `ds * distance` to `sums` (`quad_sums`); the total is -1 times the ALiBi slope's gradient."""
    if F.per_head_gradient:
        return sums + quad_sums(ds * _distance(tile, PLAN))
    else:
        return sums


@gluon.constexpr_function
def bits_layout(Q_TILE):
    """The register layout of unpacked mask bits: `[4, 16, queries]`, four groups of 16 keys.

    Each thread has the bits of the scores that it holds.
    """
    columns = [1 << bit for bit in range(3, Q_TILE.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], *([0, 0, column] for column in columns)],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 16, Q_TILE],
    )


@gluon.jit
def _mask_bits(words, q_start, kv_start, F: gl.constexpr, PLAN: gl.constexpr):
    """Loads a packed mask for 64 keys and a tile of queries: `[4, q_tile]`, the bits of 16 keys in each number."""
    IN_BITS: gl.constexpr = gl.SliceLayout(1, bits_layout(PLAN.q_tile))
    rows = q_start + gl.arange(0, PLAN.q_tile, gl.SliceLayout(0, IN_BITS))
    rows = gl.minimum(rows, F.q_length - 1) // F.mask_rows
    if F.long_score_offsets:
        rows = rows.to(gl.int64)
    sixteenth = kv_start // 16 + gl.arange(0, 4, gl.SliceLayout(1, IN_BITS))
    bit = sixteenth * 16 // F.grain
    column = gl.minimum(bit // 32, F.mask_query - 1)
    word = gl.load(words + (rows[None, :] * F.mask_query + column[:, None]))
    return word >> (bit % 32).to(gl.uint32)[:, None]


@gluon.jit
def _spread(bits, Q_TILE: gl.constexpr, GRAIN: gl.constexpr):
    """Unpacks the bits of a packed mask to booleans: whether each pair of a tile is visible."""
    IN_BITS: gl.constexpr = bits_layout(Q_TILE)
    key = (gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, IN_BITS))) // GRAIN).to(gl.uint32)
    seen = (bits[:, None, :] >> key[None, :, None]) & 1
    return gl.convert_layout(gl.reshape(seen, [64, Q_TILE]), product_layout(Q_TILE)) != 0


@gluon.jit
def _distance(tile, PLAN: gl.constexpr):
    """`|i - j|` for each pair of a tile."""
    return gl.abs(load_query_values("distance", tile.rows, tile.place, PLAN) - tile.away)


@gluon.jit
def _draws(P, batch, q_start, kv_start, key, NUMBER: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """The dropout bits of a tile: two arrays of words, each `[32, q_tile / 2]`; every four entries have a word of each.

    Entries share draws if the indices of the tile's queries and keys are consecutive and begin at multiples of 16,
    which is known only at run time. If they do not share draws, their bits are collected in the same two words.
    """
    IN_DRAWS: gl.constexpr = draws_layout(PLAN.q_tile)
    rows = gl.arange(0, 32, gl.SliceLayout(1, IN_DRAWS))
    columns = gl.arange(0, PLAN.q_tile // 2, gl.SliceLayout(0, IN_DRAWS))
    of_queries = first_counter(P.q_counters, batch, q_start, F.q_index_batch, F.q_length, PLAN.q_tile)
    of_keys = first_counter(P.kv_counters, batch, kv_start, F.kv_index_batch, F.kv_length, PLAN.kv_tile)
    if (of_queries >= 0) & (of_keys >= 0):
        first, second = philox((of_queries + columns)[None, :], (of_keys + NUMBER * 32 + rows)[:, None], key, F)
    else:
        i = (q_start + (columns >> 3) * 16 + (columns & 7))[None, :]
        j = (kv_start + (rows >> 3) * 16 + (rows & 7))[:, None]
        first, second = own_draws(P, batch, i, j, key, F)
    return first, second
