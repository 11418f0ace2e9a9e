# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Loads positions, indices and ids of a tile's queries and keys, and decides which queries see which keys.

Queries lie along the first axis of a tile of scores, or along the second if BY_KEYS. Vectors over queries or keys are
loaded as columns or rows that broadcast to the tile, so `visible` serves both cases. In every function `P` is an
`Inputs`, and `F` is a `kernel_inputs.BlockConstants`.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..kernel_inputs import INPUTS

Inputs = namedtuple("Inputs", [name for name in INPUTS if name not in ("q", "k", "v")])
"""A named tuple of pointers to a block's arrays: a field for each name in `kernel_inputs.INPUTS` except q, k and v."""


class Queries(NamedTuple):
    """What a kernel loads for the queries of a tile; a field is 0 where the call's options do not need it.

    `row` is a query's index in the block; past the last query it repeats the last index. `low` and `high` are `first`
    and `last` of the block: the first and the last key position that a query sees. `index` is the query's index in the
    whole sequence, and `segment` its segment id. `counter`, one number for the tile, is the dropout counter of its
    first query, or -1 if the entries of the tile do not share random draws (`dropout`).
    """

    row: Any
    position: Any
    low: Any
    high: Any
    index: Any
    counter: Any
    segment: Any


class Keys(NamedTuple):
    """What a kernel loads for the keys of a tile; a field is 0 where the call's options do not need it.

    `start` is the index in the block of the tile's first key. `column` is a key's index in the block; past the last
    key, where `inside` is false, it repeats the last index. The other fields mean the same as in `Queries`.
    """

    start: Any
    column: Any
    inside: Any
    position: Any
    index: Any
    counter: Any
    segment: Any


@triton.jit
def as_queries(x, BY_KEYS: tl.constexpr):
    """Reshapes a vector `x` of one value per query to `[queries, 1]`, or to `[1, queries]` if BY_KEYS."""
    if BY_KEYS:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def as_keys(x, BY_KEYS: tl.constexpr):
    """Reshapes a vector `x` of one value per key to `[1, keys]`, or to `[keys, 1]` if BY_KEYS."""
    if BY_KEYS:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def unsigned(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def of_queries(P, batch, head, start, F: tl.constexpr, TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """Loads the `Queries` of a tile: `TILE` queries of head `head` in batch row `batch`, from query `start` on."""
    counter = 0
    if F.dropout:
        counter = first_counter(P.q_counters, batch, start, F.q_index_batch, F.q_length, TILE)
    return of_rows(P, batch, head, start + tl.arange(0, TILE), counter, F, F.q_length % TILE != 0, BY_KEYS)


@triton.jit
def of_rows(P, batch, head, raw, counter, F: tl.constexpr, RAGGED: tl.constexpr, BY_KEYS: tl.constexpr):
    """Loads the `Queries` with numbers `raw` of head `head` in batch row `batch`. `RAGGED`: some may lie past the end.

    `head` is read only if ranges differ by head (`F.ranges_by_head`); otherwise any head of the batch row serves.
    """
    position = 0
    index = 0
    segment = 0
    low = 0
    high = 0
    row = raw
    if RAGGED:
        row = tl.minimum(raw, F.q_length - 1)
    if F.below:
        at = _of_head(batch, head, F.q_first_batch, F.q_first_head) + row
        low = as_queries(tl.load(P.q_first + at), BY_KEYS)
    if F.above:
        at = _of_head(batch, head, F.q_last_batch, F.q_last_head) + row
        high = as_queries(tl.load(P.q_last + at), BY_KEYS)
    if F.slopes:
        position = as_queries(tl.load(P.q_positions + (batch * F.q_positions_batch + row)), BY_KEYS)
    if F.dropout:
        index = as_queries(tl.load(P.q_index + (batch * F.q_index_batch + row)), BY_KEYS)
    if F.segments:
        # Negative segment ids mark padding, which must match no id: queries get -1, and keys -2.
        found = tl.load(P.q_segments + (batch * F.q_length + row))
        segment = as_queries(tl.where(found < 0, -1, found), BY_KEYS)
    return Queries(as_queries(row, BY_KEYS), position, low, high, index, counter, segment)


@triton.jit
def _of_head(batch, head, BATCH: tl.constexpr, HEAD: tl.constexpr):
    """The offset of a head's row in an array `[b, n, T]` with strides `BATCH` and `HEAD`; int64 if heads differ."""
    at = batch * BATCH
    if HEAD != 0:
        at = batch.to(tl.int64) * BATCH + head * HEAD
    return at


@triton.jit
def of_keys(P, batch, start, F: tl.constexpr, TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """Loads the `Keys` of a tile: `TILE` keys of batch row `batch`, from key number `start` of the block on."""
    counter = 0
    if F.dropout:
        counter = first_counter(P.kv_counters, batch, start, F.kv_index_batch, F.kv_length, TILE)
    return of_columns(P, batch, start, tl.arange(0, TILE), counter, F, TILE, BY_KEYS)


@triton.jit
def of_columns(P, batch, start, columns, counter, F: tl.constexpr, TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """Loads the `Keys` with numbers `start + columns` in batch row `batch`; their tile of `TILE` begins at `start`."""
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
    """Loads the dropout counter of the first token of a tile, token `start`; it is -1 if entries cannot share draws.

    `COUNTERS [b, tiles]` has one row for each batch row, or one for all of them if `BATCH` is 0.
    """
    at = start // TILE
    if BATCH != 0:
        at += batch * tl.cdiv(LENGTH, TILE)
    return tl.load(COUNTERS + at)


@triton.jit
def visible(queries, keys, head, F: tl.constexpr, RAGGED: tl.constexpr, SPREAD: tl.constexpr):
    """Whether each query of a tile sees each key, as booleans that broadcast to the tile.

    `RAGGED`: the tile may reach past the last key; these keys are hidden. Queries past the last one are not masked
    here. `SPREAD`: load each packed mask word once and spread its bits in registers, in a layout that the compiler
    chooses.
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
    """Loads the words of a packed mask for a tile and unpacks it to booleans; `SPREAD` as in `visible`."""
    BY_KEYS: tl.constexpr = queries.row.shape[0] == 1
    Q_TILE: tl.constexpr = queries.row.numel
    KV_TILE: tl.constexpr = keys.column.numel
    if F.grain > 1:
        return _bits_of_blocks(words, queries, keys, F)
    elif KV_TILE < 32 or not SPREAD:
        word = tl.load(words + (long_rows(queries, F) * F.mask_query + keys.column // 32))
        return ((word >> (keys.column % 32).to(tl.uint32)) & 1) != 0
    else:
        column = keys.start // 32 + tl.arange(0, KV_TILE // 32)
        if F.kv_length % KV_TILE != 0:
            column = tl.minimum(column, F.mask_query - 1)
        word = tl.load(words + (long_rows(queries, F) * F.mask_query + as_keys(column, BY_KEYS)))
        bit = tl.arange(0, 32).to(word.dtype)
        if BY_KEYS:
            return tl.reshape((word[:, None, :] >> bit[None, :, None]) & 1, (KV_TILE, Q_TILE)) != 0
        else:
            return tl.reshape((word[:, :, None] >> bit[None, None, :]) & 1, (Q_TILE, KV_TILE)) != 0


@triton.jit
def _bits_of_blocks(words, queries, keys, F: tl.constexpr):
    """`_mask_bits` for bits that are for several keys: as a column, or row, if the tile has one bit for each query."""
    KV_TILE: tl.constexpr = keys.column.numel
    ONE: tl.constexpr = F.grain % KV_TILE == 0
    row = long_rows(queries, F) // F.mask_rows * F.mask_query
    first = keys.start // F.grain
    if ONE:
        word = tl.load(words + (row + first // 32))
        return ((word >> (first % 32).to(tl.uint32)) & 1) != 0
    elif KV_TILE % F.grain == 0 and KV_TILE // F.grain <= 32:  # the bits of a tile lie in one word
        word = tl.load(words + (row + first // 32))
        return ((word >> (keys.column // F.grain - first // 32 * 32).to(tl.uint32)) & 1) != 0
    else:
        bit = keys.column // F.grain
        word = tl.load(words + (row + bit // 32))
        return ((word >> (bit % 32).to(tl.uint32)) & 1) != 0


@triton.jit
def long_rows(queries, F: tl.constexpr):
    """The indices of a tile's queries in the block; int64 if offsets into an array `[queries, keys]` exceed int32."""
    if F.long_score_offsets:
        return queries.row.to(tl.int64)
    else:
        return queries.row
