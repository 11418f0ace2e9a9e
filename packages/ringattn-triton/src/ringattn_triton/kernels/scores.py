# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""What one tile of scores is in every kernel: its values, which pairs see each other, and which of them are kept.

Queries lie on the first axis of a tile, or on the second where BY_KEYS says so; nothing else differs, because all that
comes with a query or a key has the shape of a column or a row.
`F` is `operands.Facts`; what it says is absent is never read.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .dropout import dealt
from .orientation import as_keys, as_queries, unsigned

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


class Inputs(NamedTuple):
    """The pointers of `operands.INPUTS` that decide on scores, without q and kv."""

    q_positions: Any
    kv_positions: Any
    q_index: Any
    kv_index: Any
    kv_groups: Any
    q_segments: Any
    kv_segments: Any
    bias: Any
    slopes: Any
    mask_words: Any
    mask_of_head: Any
    dense_words: Any
    seed: Any
    batch_index: Any
    head_index: Any


class Head(NamedTuple):
    """What holds for one head of one batch row: pointers to its bias and words, its slope, the counters of dropout."""

    bias: Any
    slope: Any
    mask_words: Any
    dense_words: Any
    seed: Any
    batch_index: Any
    head_index: Any


class Queries(NamedTuple):
    """The queries of a tile: `row` in the block (the last one's for rows past the end), and the first and the last
    position that a query sees as far as causality, window and chunk say.
    """

    row: Any
    inside: Any
    position: Any
    low: Any
    high: Any
    index: Any
    segment: Any


class Keys(NamedTuple):
    """The keys of a tile that begins at column `start` of the block.

    `indices` points at the index of the first. If those that follow count on from there, and it is four times a number,
    `group` is that number, else -1.
    """

    start: Any
    column: Any
    inside: Any
    position: Any
    index: Any
    segment: Any
    indices: Any
    group: Any


@triton.jit
def of_head(P, batch, head, F: tl.constexpr):
    """The `Head` of a batch row and a query head; offsets of whole arrays may exceed 2^31."""
    bias = 0
    slope = 0.0
    mask_words = 0
    dense_words = 0
    seed = 0
    batch_index = 0
    head_index = 0
    wide_batch = batch.to(tl.int64)
    wide_head = head.to(tl.int64)
    if F.bias:
        bias = P.bias + (wide_batch * F.bias_batch + wide_head * F.bias_head)
    if F.slopes:
        slope = tl.load(P.slopes + (batch * F.slopes_batch + head))
    if F.masks:
        mask = wide_head * 0
        if not F.one_mask:
            mask = tl.load(P.mask_of_head + head).to(tl.int64)
        mask_words = P.mask_words + (wide_batch * F.mask_words_batch + mask * F.mask_words_head)
    if F.dense:
        dense_words = P.dense_words + (wide_batch * F.dense_words_batch + wide_head * F.dense_words_head)
    if F.drawn:
        seed = tl.load(P.seed + batch)
        batch_index = unsigned(tl.load(P.batch_index + batch))
        head_index = unsigned(tl.load(P.head_index + head))
    return Head(bias, slope, mask_words, dense_words, seed, batch_index, head_index)


@triton.jit
def of_queries(P, batch, start, F: tl.constexpr, TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """The `Queries` of a tile that begins at row `start`."""
    return of_rows(P, batch, start + tl.arange(0, TILE), F, F.q_length % TILE != 0, BY_KEYS)


@triton.jit
def of_rows(P, batch, raw, F: tl.constexpr, RAGGED: tl.constexpr, BY_KEYS: tl.constexpr):
    """The `Queries` of some rows; `RAGGED` says that they may lie past the end."""
    position = 0
    index = 0
    segment = 0
    low = 0
    high = 0
    row = raw
    if RAGGED:
        row = tl.minimum(raw, F.q_length - 1)
    inside = as_queries(raw < F.q_length, BY_KEYS)
    if F.positions:
        found = tl.load(P.q_positions + (batch * F.q_positions_batch + row))
        position = as_queries(found, BY_KEYS)
        first, last = _range_of(found, F)
        low = as_queries(first, BY_KEYS)
        high = as_queries(last, BY_KEYS)
    if F.drawn:
        index = as_queries(tl.load(P.q_index + (batch * F.q_index_batch + row)), BY_KEYS)
    if F.segments:
        # Negative ids are padding, that never sees and is never seen: one that no key has, one that no query has.
        found = tl.load(P.q_segments + (batch * F.q_length + row))
        segment = as_queries(tl.where(found < 0, -1, found), BY_KEYS)
    return Queries(as_queries(row, BY_KEYS), inside, position, low, high, index, segment)


@triton.jit
def _range_of(position, F: tl.constexpr):
    """The first and the last position that a query sees; no sum leaves int32, however wide the window."""
    first = position
    last = position
    if F.bounded_right:
        last = tl.minimum(position, 2147483647 - F.right) + F.right
    if F.causal or F.chunked:
        last = tl.minimum(last, position)
    if F.bounded_left:
        first = tl.maximum(position, F.left - 2147483647) - F.left
    if F.chunked:
        rest = position % F.chunk
        start = position - tl.where(rest < 0, rest + F.chunk, rest)
        first = tl.maximum(first, start) if F.bounded_left else start
    return first, last


@triton.jit
def in_columns(F: tl.constexpr, SIZE: tl.constexpr, BY_KEYS: tl.constexpr):
    """Which of `SIZE` keys lies in each column of a tile, or in each row."""
    if F.dropout:
        return dealt(SIZE, BY_KEYS)
    else:
        return tl.arange(0, SIZE)


@triton.jit
def of_keys(P, batch, start, F: tl.constexpr, TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """The `Keys` of a tile that begins at column `start`."""
    return of_columns(P, batch, start, in_columns(F, TILE, BY_KEYS), F, TILE, BY_KEYS)


@triton.jit
def of_columns(P, batch, start, columns, F: tl.constexpr, TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """The `Keys` of a tile, that lie so many `columns` after its `start`."""
    position = 0
    index = 0
    segment = 0
    indices = 0
    group = 0
    raw = start + columns
    column = raw
    if F.kv_length % TILE != 0:
        column = tl.minimum(raw, F.kv_length - 1)
    inside = as_keys(raw < F.kv_length, BY_KEYS)
    if F.positions:
        position = as_keys(tl.load(P.kv_positions + (batch * F.kv_positions_batch + column)), BY_KEYS)
    if F.padded:
        index = as_keys(tl.load(P.kv_index + (batch * F.kv_index_batch + column)), BY_KEYS)
    if F.drawn:
        indices = P.kv_index + (batch * F.kv_index_batch + start)
        at = start // TILE
        if F.kv_index_batch != 0:
            at += batch * tl.cdiv(F.kv_length, TILE)
        group = tl.load(P.kv_groups + at)
    if F.segments:
        found = tl.load(P.kv_segments + (batch * F.kv_length + column))
        segment = as_keys(tl.where(found < 0, -2, found), BY_KEYS)
    return Keys(start, as_keys(column, BY_KEYS), inside, position, index, segment, indices, group)


@triton.jit
def visible(
    queries, keys, head, F: tl.constexpr, Q_RAGGED: tl.constexpr, KV_RAGGED: tl.constexpr, SPREAD: tl.constexpr
):
    """Which queries of a tile see which keys, broadcastable to the tile.

    `Q_RAGGED` and `KV_RAGGED` say that the tile may reach over the end of the block. `SPREAD` says that each word of a
    mask may be read once and spread, which leaves it to the compiler where things lie in registers.
    """
    seen = keys.column == keys.column
    if Q_RAGGED:
        seen = seen & queries.inside
    if KV_RAGGED:
        seen = seen & keys.inside
    if F.below and F.above:
        # One comparison for both ends of a range: what is before it is far behind it in unsigned numbers.
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
        seen = seen & _bits(head.mask_words, queries, keys, F, SPREAD)
    if F.dense:
        seen = seen & _bits(head.dense_words, queries, keys, F, SPREAD)
    return seen


@triton.jit
def _bits(words, queries, keys, F: tl.constexpr, SPREAD: tl.constexpr):
    """What the words of a mask say of a tile."""
    BY_KEYS: tl.constexpr = queries.row.shape[0] == 1
    Q_TILE: tl.constexpr = queries.row.numel
    KV_TILE: tl.constexpr = keys.column.numel
    if KV_TILE < 32 or not SPREAD:
        word = tl.load(words + (_rows(queries, F) * F.words_query + keys.column // 32))
        return ((word >> (keys.column % 32).to(tl.uint32)) & 1) != 0
    else:
        # Each word is read once, and spread over its 32 keys in registers.
        column = keys.start // 32 + tl.arange(0, KV_TILE // 32)
        if F.kv_length % KV_TILE != 0:
            column = tl.minimum(column, F.words_query - 1)
        word = tl.load(words + (_rows(queries, F) * F.words_query + as_keys(column, BY_KEYS)))
        return _spread(word, in_columns(F, 32, BY_KEYS), Q_TILE, KV_TILE, BY_KEYS)


@triton.jit
def _spread(word, bit, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """The bits of each word as truths about the keys of 32 columns."""
    bit = bit.to(word.dtype)
    if BY_KEYS:
        return tl.reshape((word[:, None, :] >> bit[None, :, None]) & 1, (KV_TILE, Q_TILE)) != 0
    else:
        return tl.reshape((word[:, :, None] >> bit[None, None, :]) & 1, (Q_TILE, KV_TILE)) != 0


@triton.jit
def _rows(queries, F: tl.constexpr):
    """The rows as they index something of size queries times keys."""
    if F.wide_scores:
        return queries.row.to(tl.int64)
    else:
        return queries.row


@triton.jit
def bent(product, F: tl.constexpr):
    """The hyperbolic tangent that the soft cap takes of a product, or the product itself."""
    if F.capped:
        return tanh(product * F.bend, F)
    else:
        return product


@triton.jit
def biases(queries, keys, head, F: tl.constexpr):
    """What the bias adds to a tile of scores. Read before the products, it arrives while they run."""
    if F.bias:
        if F.bias_key == 1:
            return tl.load(head.bias + (_rows(queries, F) * F.bias_query + keys.column))
        else:
            column = keys.column.to(tl.int64) if F.wide_scores else keys.column
            return tl.load(head.bias + (queries.row * F.bias_query + column * F.bias_key))
    else:
        return 0


@triton.jit
def scored(bend, bias, queries, keys, head, F: tl.constexpr):
    """The scores of a tile from `bent` and `biases`, if `F.plain` less a factor; times `F.fold` in units of log2."""
    s = bend
    if not F.plain:
        s = s * F.unbend
    if F.bias:
        s = s + bias.to(tl.float32)
    if F.slopes:
        s = s - head.slope * distance(queries, keys)
    return s


@triton.jit
def distance(queries, keys):
    """How far apart the positions of each pair are."""
    return tl.abs(queries.position - keys.position).to(tl.float32)


@triton.jit
def tanh(x, F: tl.constexpr):
    """The hyperbolic tangent: to the last bits of float32, or to 2^-11 where `F.fast` lets the device approximate."""
    if F.fast:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        size = tl.abs(x)
        decay = tl.exp2(size * (-2.0 * LOG2_E))
        far = (1.0 - decay) / (1.0 + decay)
        # Near zero the difference above would cancel: there the series is exact to float32.
        square = x * x
        series = -17.0 / 315.0 + square * (62.0 / 2835.0)
        series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * series))
        return tl.where(size < 0.25, x * series, tl.where(x < 0.0, -far, far))
