# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportGeneralTypeIssues=false
"""Kernels that see a wrong set of keys, for some masks, sizes or dtypes only."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from ringattn_conformance.cases import DTYPES

from ringattn_testing.conformance.breaks import (
    Break,
    Condition,
    always,
    bfloat16,
    changed,
    dtype,
    float16,
    half,
    has,
    in_dtype,
    masked,
    wrong_in,
)
from ringattn_testing.conformance.numpy_ring import Block, Dense, Pair, causal, chunk_from, coordinates, window, within

Ids = Callable[[Any, Any], Any]


def indices(block: Block) -> Pair:
    return block.q_index[None, None, :, None], block.kv_index[None, None, None, :]


def truncated_chunk(block: Block) -> np.ndarray:
    i, j = coordinates(block)
    assert block.chunk is not None
    return (np.trunc(i / block.chunk) == np.trunc(j / block.chunk)) & (j <= i)


def lost(name: str, when: Condition = always) -> Dense:
    """A kernel that ignores one mask under a condition."""
    return masked(name, lambda block, right: np.ones((1, 1, 1, 1), bool), when)


def either(name: str, other: str) -> Dense:
    """A kernel that lets a pair through where either of two masks does."""

    def masks(right: Any, block: Block) -> Any:
        found = right(block)
        if name in found and other in found:
            found[name] = found[name] | found.pop(other)
        return found

    return wrong_in("masks", masks)


def of_ids(wrong: Ids, when: Condition = always) -> Dense:
    """A kernel that compares ids wrongly."""
    return wrong_in("same", lambda right, block, q, kv: wrong(q, kv) if when(block) else right(block, q, kv))


def of_choice(change: Callable[[Block, Any, Any], tuple[Any, Any]], when: Condition = always) -> Dense:
    """A kernel that compares other ids, or other indices of keys: `change(block, ids, index)` gives both."""
    return wrong_in(
        "choice",
        lambda right, block, ids, index: right(block, *(change(block, ids, index) if when(block) else (ids, index))),
    )


def with_repeats(right: Any, block: Block, *rest: Any) -> Any:
    """The scores, larger by the logarithm of how often a query names the block of a key."""
    s, slope = right(block, *rest)
    if block.chosen is None:
        return s, slope
    count = (block.chosen[..., None, :] == (block.kv_index // block.case.selected_size)[:, None]).sum(-1)
    return s + np.log(np.maximum(count, 1)), slope


def real(q: Any, kv: Any) -> Any:
    return (q >= 0) & (kv >= 0)


def through(narrow: Any) -> Ids:
    return lambda q, kv: real(q, kv) & (q.astype(narrow) == kv.astype(narrow))


def with_ids(change: Callable[[Any], Any]) -> Dense:
    return changed(has("q_ids"), q_ids=lambda block: change(block.q_ids), kv_ids=lambda block: change(block.kv_ids))


def with_positions(change: Callable[[Any], Any], when: Condition = always) -> Dense:
    return changed(
        when,
        q_positions=lambda block: change(block.q_positions),
        kv_positions=lambda block: change(block.kv_positions),
    )


def with_window(change: Callable[[Any], Any], when: Condition = always) -> Dense:
    return changed(has("window", and_also=when), window=lambda block: change(block.window))


def first_keys(count: Callable[[int], int], when: Condition = always) -> Dense:
    """A kernel that sees the first `count(length)` keys only."""

    def masks(right: Any, block: Block) -> Any:
        length = block.kv_index.size
        seen = np.arange(length) < count(length)
        return right(block) | ({"tail": seen[None, None, None]} if when(block) else {})

    return wrong_in("masks", masks)


def without_tail(size: int, when: Condition = always) -> Dense:
    """A kernel that leaves out the keys after the last full tile of this size."""
    return first_keys(lambda length: length // size * size or length, when)


def whole_tile_lost(size: int, when: Condition = always) -> Dense:
    """A kernel that keeps `length % size` keys of the last tile, which is none if the tile is whole."""
    return first_keys(lambda length: length if length % size else length - size, when)


def local_builder(block: Block, right: np.ndarray) -> np.ndarray:
    """The mask of a builder by the places in the shard."""
    builder = block.case.masks_of_heads
    assert builder is not None
    rows, columns = (np.arange(index.size)[None] for index in (block.q_index, block.kv_index))
    return builder.at(rows, columns, block.q.shape[2])


def without_tiles_of_later_keys(block: Block, right: np.ndarray) -> np.ndarray:
    """The mask without tiles of 16 whose first key has a later position than their last query."""
    rows, columns = (16 * (np.arange(length) // 16) for length in right.shape[2:])
    last = np.minimum(rows + 15, rows.size - 1)
    return right & (block.kv_positions[:, None, None, columns] <= block.q_positions[:, None, last, None])


def alone(block: Block) -> bool:
    return block.placement.ring == 1


def without_right_side(when: Condition = always) -> Dense:
    return with_window(lambda sides: (sides[0], None), when)


def without_tiles_of_the_first_row(block: Block, right: np.ndarray) -> np.ndarray:
    """The mask without tiles of 16 whose keys come after all queries in the first row of the batch."""
    queries, keys = (x[0, 16 * (np.arange(x.shape[1]) // 16)] for x in (block.q_positions, block.kv_positions))
    return right & (keys <= queries[:, None] + 15)


def without_tiles_of_128_of_the_first_row(block: Block, right: np.ndarray) -> np.ndarray:
    """The mask without tiles of 128 whose lowest key comes after the highest query in the first row of the batch."""

    def of_tiles(bound: np.ufunc, x: np.ndarray) -> np.ndarray:
        starts = np.arange(0, x.size, 128)
        return bound.reduceat(x, starts)[np.arange(x.size) // 128]

    highest, lowest = of_tiles(np.maximum, block.q_positions[0]), of_tiles(np.minimum, block.kv_positions[0])
    return right & (lowest <= highest[:, None])


def of_range(change: Callable[[Block, Any, Any], Any], when: Condition = always) -> Dense:
    """A kernel with other ranges: `change(block, first, last)` gives both ends, under a condition."""
    return masked(
        "range", lambda block, right: within(coordinates(block), *change(block, block.first, block.last)), when
    )


def moved(first: int, last: int) -> Callable[[Block, Any, Any], Any]:
    """Both ends so many positions later."""
    return lambda block, lowest, highest: (lowest + first, highest + last)


def of_both(change: Callable[[Any], Any]) -> Callable[[Block, Any, Any], Any]:
    return lambda block, first, last: (change(first), change(last))


def where_empty_all(block: Block, first: Any, last: Any) -> Any:
    empty = first > last
    return np.where(empty, -(2**31), first), np.where(empty, 2**31, last)


def in_unsigned(block: Block, right: np.ndarray) -> np.ndarray:
    """`position - first <= last - first` in 32 bits without a sign: true for an empty range that nobody took out."""
    _, j = coordinates(block)
    return (j - block.first) % 2**32 <= (block.last - block.first) % 2**32


def clipped(block: Block, first: Any, last: Any) -> Any:
    return np.maximum(first, block.q_positions.min()), np.minimum(last, block.q_positions.max())


def range_by_key_head(block: Block, first: Any, last: Any) -> Any:
    heads = np.arange(block.q.shape[2]) // block.group * block.group
    return tuple(x[:, heads] if x.shape[1] > 1 else x for x in (first, last))


def without_tiles_between_their_ends(block: Block, right: np.ndarray) -> np.ndarray:
    """The mask without tiles of 16 that neither the first nor the last of their queries sees a key of."""
    tile = 16 * (np.arange(block.q_index.size) // 16)
    ends = tile, np.minimum(tile + 15, tile.size - 1)
    lowest, highest = block.first[:, :, ends[0]], block.last[:, :, ends[1]]
    keys = 16 * (np.arange(block.kv_index.size) // 16)
    j = block.kv_positions[:, None, None]
    least, greatest = j[..., keys], j[..., np.minimum(keys + 15, keys.size - 1)]
    return right & (greatest >= lowest) & (least <= highest)


WINDOWS: Final = {
    "In half precision the window is ignored": Break(lost("window", half)),
    "With `causal` the window is ignored": Break(lost("window", has("causal"))),
    "With grouped heads the window is ignored": Break(lost("window", lambda block: block.group > 1)),
    "With segment ids the window is ignored": Break(lost("window", has("q_ids"))),
    "A side of a window that is `None` is taken for 0": Break(
        with_window(lambda sides: tuple(side or 0 for side in sides), lambda block: None in block.window),
    ),
    "A left side of 0 is taken for `None`": Break(with_window(lambda sides: (sides[0] or None, sides[1]))),
    "A right side of 0 is taken for `None`": Break(with_window(lambda sides: (sides[0], sides[1] or None))),
    "The right end of a window is one key too far": Break(
        with_window(lambda sides: (sides[0], sides[1] and sides[1] + 1)),
    ),
    "The right side of a window is taken for `None`": Break(
        without_right_side(),
        rarer=tuple((name, without_right_side(in_dtype(name, alone))) for name in DTYPES),
    ),
    "In half precision the right end of a window is exclusive": Break(
        with_window(lambda sides: (sides[0], sides[1] and sides[1] - 1), half),
    ),
    "In half precision a left side of 0 is taken for `None`": Break(
        with_window(lambda sides: (sides[0] or None, sides[1]), half),
    ),
    "With segment ids a right side of 0 is taken for `None`": Break(
        with_window(lambda sides: (sides[0], sides[1] or None), has("q_ids")),
    ),
    "The sides of a window are swapped": Break(with_window(lambda sides: sides[::-1])),
    "A window compares indices where positions are given": Break(
        masked("window", lambda block, right: window(indices(block), block.window)),
    ),
    "A key passes if the window or `causal` allows it": Break(either("window", "causal")),
    "A key passes if the window or the chunk allows it": Break(either("window", "chunk")),
    "With `causal`, in float16 and zigzag layout the window is ignored": Break(
        lost("window", has("causal", and_also=lambda block: float16(block) and block.placement.layout == "zigzag")),
    ),
    "With chunks and segment ids in float16 the window is ignored": Break(
        lost("window", has("chunk", "q_ids", and_also=float16)),
    ),
}
POSITIONS: Final = {
    "`causal` compares indices in half precision": Break(
        masked("causal", lambda block, right: causal(indices(block)), half),
    ),
    "In zigzag layout a query does not see its own key": Break(
        masked(
            "causal",
            lambda block, right: right & ~causal(coordinates(block)[::-1]),
            lambda block: block.placement.layout == "zigzag",
        ),
    ),
    "With a window and segment ids `causal` is ignored": Break(lost("causal", has("window", "q_ids"))),
    "With a bias in bfloat16 `causal` is ignored": Break(lost("causal", has("bias", and_also=bfloat16))),
    "With a dense mask in float16 `causal` is ignored": Break(lost("causal", has("mask", and_also=float16))),
    "On one rank `causal` is ignored in float16": Break(
        lost("causal", in_dtype("float16", alone)),
    ),
    "Chunks compare indices where positions are given": Break(
        masked("chunk", lambda block, right: chunk_from(block, indices(block))),
    ),
    "Chunks are counted from the first position of the shard": Break(
        masked("chunk", lambda block, right: chunk_from(block, coordinates(block), block.q_positions.min())),
    ),
    "A query sees its whole chunk": Break(
        masked(
            "chunk",
            lambda block, right: right | np.swapaxes(right, 2, 3) if right.shape[2] == right.shape[3] else right,
        ),
    ),
    "In half precision negative positions are divided towards zero": Break(
        masked("chunk", lambda block, right: truncated_chunk(block), half),
    ),
    "With a window in half precision the chunk is ignored": Break(lost("chunk", has("window", and_also=half))),
    "With segment ids in bfloat16 the chunk is ignored": Break(
        lost("chunk", has("q_ids", and_also=bfloat16)),
    ),
    "Positions have 16 bits": Break(with_positions(lambda x: x.astype(np.int16).astype(np.int64))),
    "From the second rank on, positions have 16 bits": Break(
        with_positions(lambda x: x.astype(np.int16).astype(np.int64), lambda block: block.rank > 0),
    ),
    "Positions are compared in float32": Break(with_positions(lambda x: x.astype(np.float32))),
    "All rows of the batch have the positions of the first": Break(with_positions(lambda x: x[:1])),
    "In half precision negative positions are taken for 0": Break(with_positions(lambda x: np.maximum(x, 0), half)),
    "Only queries have the positions that are given": Break(changed(kv_positions=lambda block: block.kv_index[None])),
    "In half precision each position is one more than the one before it": Break(
        with_positions(
            lambda x: x[:, :1] + np.arange(x.shape[1]),
            lambda block: half(block) and block.case.positions is not None and block.placement.layout == "contiguous",
        ),
    ),
    "In half precision a tile is skipped if its first key comes after its last query": Break(
        masked("causal", without_tiles_of_later_keys, half),
    ),
    "In half precision tiles are skipped for all rows of the batch by the positions of the first": Break(
        masked(
            "causal",
            without_tiles_of_the_first_row,
            lambda block: (
                half(block)
                and bool(np.all(np.diff(block.q_positions) == 1) and np.all(np.diff(block.kv_positions) == 1))
            ),
        ),
        rarer=(("float32", masked("causal", without_tiles_of_128_of_the_first_row, dtype("float32"))),),
    ),
    "Of an odd number of keys the last is left out in bfloat16": Break(without_tail(2, bfloat16)),
    "The keys after the last multiple of 8 are left out in half precision": Break(without_tail(8, half)),
    "The keys after the last multiple of 128 are left out in half precision": Break(without_tail(128, half)),
}
IDS: Final = {
    "Segment ids have 8 bits": Break(of_ids(through(np.uint8))),
    "Segment ids have 16 bits": Break(of_ids(through(np.uint16))),
    "Segment ids have 24 bits": Break(of_ids(lambda q, kv: real(q, kv) & ((q ^ kv) % 2**24 == 0))),
    "Segment ids are compared in float32": Break(of_ids(through(np.float32))),
    "The last bit of segment ids is lost": Break(of_ids(lambda q, kv: real(q, kv) & (q >> 1 == kv >> 1))),
    "In half precision the id 0 is padding": Break(of_ids(lambda q, kv: (q == kv) & (q > 0), half)),
    "Only the id -1 is padding": Break(of_ids(lambda q, kv: (q == kv) & (q != -1))),
    "In half precision padding sees padding of its own id": Break(of_ids(lambda q, kv: q == kv, half)),
    "In half precision every query sees the keys in padding": Break(
        of_ids(lambda q, kv: real(q, kv) & (q == kv) | (kv < 0), half),
    ),
    "A query sees all documents before its own": Break(of_ids(lambda q, kv: real(q, kv) & (q >= kv))),
    "From the third row of the batch on, the ids are those of the second": Break(
        with_ids(lambda ids: ids[np.minimum(np.arange(len(ids)), 1)]),
    ),
    "With ALiBi in half precision segment ids are ignored": Break(lost("ids", has("slopes", and_also=half))),
    "With `mask_builder` and a dense mask segment ids are ignored": Break(lost("ids", has("built", "mask"))),
    "With `causal` and heads of 256 in float16 segment ids are ignored": Break(
        lost("ids", has("causal", and_also=lambda block: float16(block) and block.q.shape[-1] == 256)),
    ),
}
RANGES: Final = {
    "The first key of a range is exclusive": Break(
        of_range(moved(1, 0)), rarer=tuple((name, of_range(moved(1, 0), dtype(name))) for name in DTYPES)
    ),
    "The last key of a range is exclusive": Break(
        of_range(moved(0, -1)), rarer=tuple((name, of_range(moved(0, -1), dtype(name))) for name in DTYPES)
    ),
    "A range begins one key too early": Break(
        of_range(moved(-1, 0)), rarer=tuple((name, of_range(moved(-1, 0), dtype(name))) for name in DTYPES)
    ),
    "A range ends one key too late": Break(
        of_range(moved(0, 1)), rarer=tuple((name, of_range(moved(0, 1), dtype(name))) for name in DTYPES)
    ),
    "All rows of the batch have the ranges of the first": Break(of_range(of_both(lambda x: x[:1]))),
    "In half precision the rows of the batch have each other's ranges": Break(
        of_range(of_both(lambda x: x[::-1]), half)
    ),
    "All heads have the ranges of the first": Break(of_range(of_both(lambda x: x[:, :1]))),
    "In half precision the heads have the ranges of the head after": Break(
        of_range(of_both(lambda x: np.roll(x, -1, 1)), half)
    ),
    "Ranges are read by key heads": Break(of_range(range_by_key_head)),
    "A query has the range of the query after it": Break(of_range(of_both(lambda x: np.roll(x, -1, 2)))),
    "A query with an empty range sees every key": Break(of_range(where_empty_all)),
    "In bfloat16 a query with an empty range sees every key": Break(of_range(where_empty_all, bfloat16)),
    "Ranges are compared without a sign, and empty ones see every key": Break(masked("range", in_unsigned)),
    "From the second hop on, ranges are ignored": Break(lost("range", lambda block: block.hop > 0)),
    "From the second hop on, ranges are ignored in half precision": Break(
        lost("range", lambda block: block.hop > 0 and half(block))
    ),
    "Ranges end where the shard of the queries ends": Break(
        of_range(clipped), rarer=tuple((name, of_range(clipped, dtype(name))) for name in DTYPES)
    ),
    "Ranges compare indices where positions are given": Break(
        masked("range", lambda block, right: within(indices(block), block.first, block.last)),
    ),
    "Ranges have 16 bits": Break(of_range(of_both(lambda x: x.astype(np.int16).astype(np.int64)))),
    "Ranges are compared in float32": Break(
        masked(
            "range",
            lambda block, right: within(
                [x.astype(np.float32) for x in coordinates(block)],
                *(x.astype(np.float32) for x in (block.first, block.last)),
            ),
        )
    ),
    "With `causal` the range is ignored": Break(lost("range", has("causal"))),
    "With a window in half precision the range is ignored": Break(lost("range", has("window", and_also=half))),
    "With a chunk the range is ignored": Break(lost("range", has("chunk"))),
    "With segment ids the range is ignored": Break(lost("range", has("q_ids"))),
    "With a dense mask the range is ignored": Break(lost("range", has("mask"))),
    "With a range `causal` is ignored": Break(lost("causal", has("first"))),
    "With a range the window is ignored": Break(lost("window", has("first"))),
    "With a range segment ids are ignored": Break(lost("ids", has("first"))),
    "A key passes if the range or the window allows it": Break(either("range", "window")),
    "In half precision ranges that differ by head are ignored": Break(
        lost("range", lambda block: half(block) and block.first.shape[1] > 1)
    ),
    "In half precision ranges that all rows of the batch share are ignored": Break(
        lost("range", lambda block: half(block) and block.first.shape[0] == 1)
    ),
    "A tile of 16 is skipped if neither its first nor its last query sees it": Break(
        masked("range", without_tiles_between_their_ends)
    ),
}
CHOSEN: Final = {
    "The ids of chosen blocks are one too large": Break(of_choice(lambda block, ids, index: (ids + 1, index))),
    "In half precision the ids of chosen blocks are one too small": Break(
        of_choice(lambda block, ids, index: (ids - 1, index), half)
    ),
    "Ids count the keys of the shard": Break(of_choice(lambda block, ids, index: (ids, index - index.min()))),
    "Ids count the keys of the shard of the queries": Break(
        of_choice(lambda block, ids, index: (ids, index - block.q_index.min()))
    ),
    "All heads have the ids of the first": Break(of_choice(lambda block, ids, index: (ids[:, :1], index))),
    "Heads have the ids of the next group": Break(
        of_choice(lambda block, ids, index: (np.roll(ids, block.group, 1), index))
    ),
    "All heads of a group have the ids of its first": Break(
        of_choice(lambda block, ids, index: (ids[:, np.arange(ids.shape[1]) // block.group * block.group], index))
    ),
    "All rows of the batch have the ids of the first": Break(of_choice(lambda block, ids, index: (ids[:1], index))),
    "A query that chooses nothing sees every key": Break(
        masked("chosen", lambda block, right: right | (block.chosen < 0).all(-1)[..., None])
    ),
    "The id -1 is the last block": Break(
        of_choice(
            lambda block, ids, index: (
                np.where(ids < 0, block.case.kv_length // block.case.selected_size - 1, ids),
                index,
            )
        )
    ),
    "The last id of each query is ignored": Break(of_choice(lambda block, ids, index: (ids[..., :-1], index))),
    "An id counts as often as it is repeated": Break(wrong_in("scores", with_repeats)),
    "The backward pass loses every fourth block": Break(
        changed(has("chosen"), ("backward",), chosen=lambda block: np.where(block.chosen % 4 == 3, -1, block.chosen))
    ),
    "With `causal` the choice is ignored": Break(lost("chosen", has("causal"))),
    "With a choice `causal` is ignored": Break(lost("causal", has("chosen"))),
    "A key passes if the choice or the dense mask allows it": Break(either("chosen", "mask")),
    "Blocks of 64 keys or more are ignored": Break(
        lost("chosen", lambda block: block.chosen is not None and block.case.selected_size >= 64)
    ),
}
GIVEN: Final = {
    "The mask of `mask_builder` is read at the places in the shard": Break(masked("built", local_builder)),
    "All heads have the mask of the first": Break(masked("built", lambda block, right: right[:, :1])),
    "From the third head on, heads have the mask of the first or of the second by turns": Break(
        masked("built", lambda block, right: right[:, np.arange(right.shape[1]) % 2]),
    ),
    "`mask_of_head` is read by key heads": Break(
        masked("built", lambda block, right: right[:, np.arange(block.q.shape[2]) // block.group]),
    ),
    "A key passes if the mask of `mask_builder` or the window allows it": Break(either("built", "window")),
    "A key passes if the mask of `mask_builder` or the dense mask allows it": Break(either("built", "mask")),
    "With a window in float16 the mask of `mask_builder` is ignored": Break(
        lost("built", has("window", and_also=float16)),
    ),
    "All heads have the dense mask of the first": Break(masked("mask", lambda block, right: right[:, :1])),
    "All rows of the batch have the dense mask of the first": Break(masked("mask", lambda block, right: right[:1])),
    "In half precision a dense mask with all axes is read for the rows of the batch in reverse order": Break(
        masked("mask", lambda block, right: right[::-1] if right.shape[1] > 1 else right, half),
    ),
    "In half precision a dense mask that all heads share is ignored": Break(
        lost("mask", lambda block: half(block) and block.mask.shape[1] == 1),
    ),
    "In half precision a dense mask that all rows of the batch share is ignored": Break(
        lost("mask", lambda block: half(block) and block.mask.shape[0] == 1),
    ),
    "With dropout the dense mask is ignored": Break(lost("mask", has("kept"))),
}
