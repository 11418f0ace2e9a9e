# SPDX-License-Identifier: Apache-2.0
"""Masks, soft cap, ALiBi and dropout of a tile of scores in the one-pass backward. The rows of a tile are keys."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.scores import LOG2_E, bent, biased, lost_by_distance
from ..kernels.tile_loop import owned
from ..kernels.tokens import Queries, of_columns, visible
from .backward_memory import load_query_values, read
from .dropout import draws_by_keys, kept
from .layouts import bits_layout, product_layout, row_layout


class BackwardTurn(NamedTuple):
    """What the steps of a consumer in a turn have in common, for one query head of the group."""

    shared: Any
    inputs: Any  # P
    number: Any
    head: Any  # `kernels.scores.Head`; 0 in calls in which no option but a bias depends on the head


class Tile(NamedTuple):
    """What a step reads for its tile of scores beside q, k, v and dout; a field is 0 where the options do not need it.

    Values of queries are read from `shared` just before they are used, to save registers.
    """

    shared: Any
    stage: Any  # of the step's queries
    head: Any
    keys: Any
    away: Any  # for ALiBi: the position of each key minus that of the tile's first query, float32; exact up to 2^24
    word_0: Any  # the two words of each dropout draw
    word_1: Any
    bits: Any  # a packed mask, 16 keys in each number
    bias: Any


@gluon.jit
def load_tile(
    turn, stage, FIRST_KEY: gl.constexpr, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Loads the `Tile` of the queries in `stage` and of the 64 keys from key `FIRST_KEY` of a turn on."""
    OF_KEYS: gl.constexpr = row_layout(PLAN.q_tile)
    shared, P = turn.shared, turn.inputs
    keys = 0
    away = 0
    word_0 = 0
    word_1 = 0
    bits = 0
    bias = 0
    if MASKED or F.slopes or F.dropout:
        key_tile, batch, _ = owned(turn.number, T, F.kv_heads)
        q_start = read(shared, "tile", stage) * PLAN.q_tile
        kv_start = key_tile * PLAN.kv_tile
        if MASKED:
            columns = FIRST_KEY + gl.arange(0, 64, OF_KEYS)
            keys = of_columns(P, batch, kv_start, columns, 0, F, PLAN.kv_tile, True)
        if F.slopes:
            column = kv_start + FIRST_KEY + gl.arange(0, 64, OF_KEYS)
            if F.kv_length % PLAN.kv_tile != 0:
                column = gl.minimum(column, F.kv_length - 1)
            position = gl.load(P.kv_positions + (batch * F.kv_positions_batch + column))
            origin = gl.load(P.q_positions + (batch * F.q_positions_batch + q_start))
            away = (position - origin).to(gl.float32)[:, None]
        if F.dropout:
            key = turn.head.dropout_key
            word_0, word_1 = draws_by_keys(P, batch, q_start, kv_start + FIRST_KEY, key, FIRST_KEY // 64, F, PLAN)
        if MASKED and F.masks:
            bits = _load_bits(turn.head.mask_words, q_start, kv_start + FIRST_KEY, F, PLAN)
    if F.bias:
        bias = shared.bias.index(stage).slice(FIRST_KEY, 64, dim=1).permute((1, 0)).load(product_layout(PLAN.q_tile))
    return Tile(shared, stage, turn.head, keys, away, word_0, word_1, bits, bias)


@gluon.jit
def probabilities(s, tile, F: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr):
    """Two results: the weights `p` after dropout, without the factor `1 / (1 - dropout)`, and `ds_factor`.

    `ds_factor` is `p` before dropout times the derivative of the soft cap. Its sign is negative where dropout drops
    the entry.
    """
    FOLD: gl.constexpr = F.unbend * LOG2_E
    bent_product = bent(s, F)
    lse = 0.0 if PLAN.subtracting else load_query_values(tile.shared, "lse", tile.stage, PLAN)
    if F.bias:
        p = gl.exp2(biased(bent_product * F.unbend, tile.bias) * LOG2_E - lse)
    elif F.slopes:
        lost = lost_by_distance(tile.head, F, False)
        p = gl.exp2(bent_product * FOLD - lse - (lost * LOG2_E) * distance(tile, PLAN))
    else:
        p = gl.exp2(bent_product * FOLD - lse)
    if MASKED:  # queries past the end have lse +inf
        UNMASKED: gl.constexpr = F.without_masks
        RAGGED: gl.constexpr = F.kv_length % PLAN.kv_tile != 0
        seen = visible(_queries(tile, F, PLAN), tile.keys, tile.head, UNMASKED, RAGGED, False)
        if F.masks:
            seen = seen & _unpack_bits(tile.bits, PLAN.q_tile, F.grain)
        p = gl.where(seen, p, 0.0)
    if F.dropout:
        p = gl.where(kept(tile.word_0, tile.word_1, F, PLAN.q_tile, True), p, -p)
    ds_factor = p
    if F.capped:
        ds_factor = p * (1.0 - bent_product * bent_product)
    if F.dropout:
        p = gl.maximum(p, 0.0)
    return p, ds_factor


@gluon.jit
def _queries(tile, F: gl.constexpr, PLAN: gl.constexpr):
    """The `Queries` that masks need."""
    low = _integers("low", tile, PLAN) if F.below else 0
    high = _integers("high", tile, PLAN) if F.above else 0
    segment = _integers("segment", tile, PLAN) if F.segments else 0
    return Queries(0, 0, low, high, 0, 0, segment)


@gluon.jit
def _integers(KIND: gl.constexpr, tile, PLAN: gl.constexpr):
    return load_query_values(tile.shared, KIND, tile.stage, PLAN).to(gl.int32, bitcast=True)


@gluon.jit
def score_gradients(ds_factor, dp, tile, F: gl.constexpr, PLAN: gl.constexpr):
    """The gradient of the scores, or with a soft cap that of the products `q k`. `ds_factor`: see `probabilities`.

    `dp` is `dout v`, from which delta is subtracted already if `PLAN.subtracting`.
    """
    if PLAN.subtracting:
        return ds_factor * dp
    else:
        minus_delta = load_query_values(tile.shared, "delta", tile.stage, PLAN)
        if F.dropout:
            return gl.abs(ds_factor) * gl.where(ds_factor > 0.0, dp * F.keep_weight + minus_delta, minus_delta)
        else:
            return ds_factor * (dp + minus_delta)


@gluon.jit
def distance(tile, PLAN: gl.constexpr):
    """`|i - j|` for each pair of a tile."""
    return gl.abs(load_query_values(tile.shared, "offset", tile.stage, PLAN) - tile.away)


@gluon.jit
def _load_bits(words, q_start, kv_start, F: gl.constexpr, PLAN: gl.constexpr):
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
def _unpack_bits(bits, Q_TILE: gl.constexpr, GRAIN: gl.constexpr):
    """Unpacks the bits of a packed mask to booleans: whether each pair of a tile is visible."""
    IN_BITS: gl.constexpr = bits_layout(Q_TILE)
    key = (gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, IN_BITS))) // GRAIN).to(gl.uint32)
    seen = (bits[:, None, :] >> key[None, :, None]) & 1
    return gl.convert_layout(gl.reshape(seen, [64, Q_TILE]), product_layout(Q_TILE)) != 0
