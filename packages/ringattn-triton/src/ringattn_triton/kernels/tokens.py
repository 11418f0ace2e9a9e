# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""The queries and keys of a tile, what a kernel loads of them, and which queries see which keys.

Queries lie along the first axis of a tile, or along the second if BY_KEYS. Every loaded vector has the shape of a
column or a row, so that the other functions serve both cases. `P` is `Inputs`, and `F` is
`kernel_inputs.BlockConstants`.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..kernel_inputs import INPUTS

Inputs = namedtuple("Inputs", [name for name in INPUTS if name not in ("q", "k", "v")])
"""The pointers to the arrays in `kernel_inputs.INPUTS`, except q, k and v."""


class Queries(NamedTuple):
    """The queries of a tile.

    `row` is the index in the block, at most that of the last query. `low` and `high` are the first and last position
    that a query sees by causality, window and chunk. `counter` is the dropout counter of the first query, or -1 if
    entries do not share draws (`dropout`).
    """

    row: Any
    position: Any
    low: Any
    high: Any
    index: Any
    counter: Any
    segment: Any


class Keys(NamedTuple):
    """The keys of a tile that begins at column `start` of the block; `counter` as for queries."""

    start: Any
    column: Any
    inside: Any
    position: Any
    index: Any
    counter: Any
    segment: Any


@triton.jit
def as_queries(x, BY_KEYS: tl.constexpr):
    """A vector with a value for each query, as a column of the tile, or as a row if BY_KEYS."""
    if BY_KEYS:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def as_keys(x, BY_KEYS: tl.constexpr):
    """A vector with a value for each key, as a row of the tile, or as a column if BY_KEYS."""
    if BY_KEYS:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def unsigned(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def of_queries(P, batch, start, F: tl.constexpr, TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """Loads the `Queries` of `TILE` rows of a batch row, from row `start` of the block on."""
    counter = 0
    if F.dropout:
        counter = first_counter(P.q_counters, batch, start, F.q_index_batch, F.q_length, TILE)
    return of_rows(P, batch, start + tl.arange(0, TILE), counter, F, F.q_length % TILE != 0, BY_KEYS)


@triton.jit
def of_rows(P, batch, raw, counter, F: tl.constexpr, RAGGED: tl.constexpr, BY_KEYS: tl.constexpr):
    """Loads the `Queries` of the rows `raw` of a batch row; `RAGGED`: they may lie past the end."""
    position = 0
    index = 0
    segment = 0
    low = 0
    high = 0
    row = raw
    if RAGGED:
        row = tl.minimum(raw, F.q_length - 1)
    if F.positions:
        found = tl.load(P.q_positions + (batch * F.q_positions_batch + row))
        position = as_queries(found, BY_KEYS)
        first, last = range_of(found, F)
        low = as_queries(first, BY_KEYS)
        high = as_queries(last, BY_KEYS)
    if F.dropout:
        index = as_queries(tl.load(P.q_index + (batch * F.q_index_batch + row)), BY_KEYS)
    if F.segments:
        # Negative ids are padding, which must equal nothing: queries get -1, and keys -2.
        found = tl.load(P.q_segments + (batch * F.q_length + row))
        segment = as_queries(tl.where(found < 0, -1, found), BY_KEYS)
    return Queries(as_queries(row, BY_KEYS), position, low, high, index, counter, segment)


@triton.jit
def range_of(position, F: tl.constexpr):
    """The first and the last position that a query sees. Sums are limited so that they fit int32 for every window."""
    first = position
    last = position
    if F.right is not None:
        last = tl.minimum(position, 2147483647 - F.right) + F.right
    if F.causal or F.chunk is not None:
        last = tl.minimum(last, position)
    if F.left is not None:
        first = tl.maximum(position, F.left - 2147483647) - F.left
    if F.chunk is not None:
        rest = position % F.chunk
        start = position - tl.where(rest < 0, rest + F.chunk, rest)
        first = tl.maximum(first, start) if F.left is not None else start
    return first, last


@triton.jit
def of_keys(P, batch, start, F: tl.constexpr, TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """Loads the `Keys` of `TILE` columns of a batch row, from column `start` of the block on."""
    counter = 0
    if F.dropout:
        counter = first_counter(P.kv_counters, batch, start, F.kv_index_batch, F.kv_length, TILE)
    return of_columns(P, batch, start, tl.arange(0, TILE), counter, F, TILE, BY_KEYS)


@triton.jit
def of_columns(P, batch, start, columns, counter, F: tl.constexpr, TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """Loads the `Keys` at some `columns` of the tile that begins at column `start` of the block."""
    position = 0
    index = 0
    segment = 0
    raw = start + columns
    column = raw
    if F.kv_length % TILE != 0:
        column = tl.minimum(raw, F.kv_length - 1)
    inside = as_keys(raw < F.kv_length, BY_KEYS)
    if F.positions:
        position = as_keys(tl.load(P.kv_positions + (batch * F.kv_positions_batch + column)), BY_KEYS)
    if F.padded or F.dropout:
        index = as_keys(tl.load(P.kv_index + (batch * F.kv_index_batch + column)), BY_KEYS)
    if F.segments:
        found = tl.load(P.kv_segments + (batch * F.kv_length + column))
        segment = as_keys(tl.where(found < 0, -2, found), BY_KEYS)
    return Keys(start, as_keys(column, BY_KEYS), inside, position, index, counter, segment)


@triton.jit
def first_counter(COUNTERS, batch, start, BATCH: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr):
    """Loads the dropout counter of a tile's first token."""
    at = start // TILE
    if BATCH != 0:
        at += batch * tl.cdiv(LENGTH, TILE)
    return tl.load(COUNTERS + at)


@triton.jit
def visible(queries, keys, head, F: tl.constexpr, RAGGED: tl.constexpr, SPREAD: tl.constexpr):
    """Which queries of a tile see which keys, broadcastable to the tile.

    `RAGGED`: the tile may reach past the last key; kernels need no mask for rows past the last query. `SPREAD`: load
    each mask word once and spread its bits in registers, in whatever layout the compiler chooses.
    """
    seen = keys.column == keys.column
    if RAGGED:
        seen = seen & keys.inside
    if F.below and F.above:
        # One unsigned comparison tests both ends of the range: differences below zero wrap to large numbers.
        seen = seen & (unsigned(keys.position - queries.low) <= unsigned(queries.high - queries.low))
    elif F.below:
        seen = seen & (keys.position >= queries.low)
    elif F.above:
        seen = seen & (keys.position <= queries.high)
    if F.segments:
        seen = seen & (queries.segment == keys.segment)
    if F.padded:
        seen = seen & (keys.index >= 0)
    if F.masks:
        seen = seen & _mask_bits(head.mask_words, queries, keys, F, SPREAD)
    return seen


@triton.jit
def _mask_bits(words, queries, keys, F: tl.constexpr, SPREAD: tl.constexpr):
    """Loads a packed mask for a tile, as booleans."""
    BY_KEYS: tl.constexpr = queries.row.shape[0] == 1
    Q_TILE: tl.constexpr = queries.row.numel
    KV_TILE: tl.constexpr = keys.column.numel
    if KV_TILE < 32 or not SPREAD:
        word = tl.load(words + (wide_rows(queries, F) * F.mask_query + keys.column // 32))
        return ((word >> (keys.column % 32).to(tl.uint32)) & 1) != 0
    else:
        column = keys.start // 32 + tl.arange(0, KV_TILE // 32)
        if F.kv_length % KV_TILE != 0:
            column = tl.minimum(column, F.mask_query - 1)
        word = tl.load(words + (wide_rows(queries, F) * F.mask_query + as_keys(column, BY_KEYS)))
        bit = tl.arange(0, 32).to(word.dtype)
        if BY_KEYS:
            return tl.reshape((word[:, None, :] >> bit[None, :, None]) & 1, (KV_TILE, Q_TILE)) != 0
        else:
            return tl.reshape((word[:, :, None] >> bit[None, None, :]) & 1, (Q_TILE, KV_TILE)) != 0


@triton.jit
def wide_rows(queries, F: tl.constexpr):
    """The rows of the queries, in int64 if an array of queries times keys has offsets beyond int32."""
    if F.wide_scores:
        return queries.row.to(tl.int64)
    else:
        return queries.row
