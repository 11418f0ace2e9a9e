# SPDX-License-Identifier: Apache-2.0
"""Segment ids, positions, ranges and masks, by the names in `cases.json`; each mask also in a version for oracles."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from ringattn_core import masks

from .oracle import Problem, positions

Pair = tuple[np.ndarray, np.ndarray]
Draw = Callable[[int, int, int], Pair]
"""A function of batch, query and key length that gives ids, `[B, T]` and `[B, S]`, or positions, `[T]` or `[B, T]`."""


def _documents(batch: int, length: int, shares: tuple[float, ...]) -> np.ndarray:
    """Ids of consecutive documents with these shares of the length; boundaries differ between batch rows."""
    rows = []
    for row in range(batch):
        ends = (np.cumsum(shares) * length).astype(int) + row
        rows.append(np.searchsorted(ends, np.arange(length), side="right"))
    return np.stack(rows).astype(np.int32)


def packed(batch: int, rows: int, columns: int) -> Pair:
    ids = _documents(batch, rows, (0.4, 0.3))
    return ids, ids[:, :columns]


def padding(batch: int, rows: int, columns: int) -> Pair:
    """The last quarter of the tokens is padding (id -1, the last two tokens -7), and so is token 3."""
    ids = _documents(batch, rows, (0.3, 0.3))
    ids[:, -rows // 4 :] = -1
    ids[:, -2:] = -7
    ids[:, 3] = -1
    return ids, ids.copy()


def unseen_ranks(batch: int, rows: int, columns: int) -> Pair:
    """The first half of the queries has an id that no key has, so these queries see nothing."""
    q_ids = np.full((batch, rows), 3, np.int32)
    q_ids[:, : rows // 2] = 8
    return q_ids, np.full((batch, columns), 3, np.int32)


def padding_among_tokens(batch: int, rows: int, columns: int) -> Pair:
    """Padding: the last quarter of the tokens, which fills whole tiles, and every third token before it."""
    token = np.arange(rows)
    ids = np.where((token % 3 == 1) | (token >= 3 * rows // 4), -1, 0)[None].repeat(batch, 0).astype(np.int32)
    return ids, ids


def large_ids(batch: int, rows: int, columns: int) -> Pair:
    """Document ids that become equal if rounded to float32, or cut to 30 or fewer bits; boundaries differ by row."""
    names = np.array([2**24, 2**24 + 1, 2**24 + 2**16, 2**30 + 2**24], np.int32)
    q_ids, kv_ids = (_documents(batch, length, (0.3, 0.25, 0.25)) for length in (rows, columns))
    return names[q_ids], names[kv_ids]


def interleaved(batch: int, rows: int, columns: int) -> Pair:
    """Ids like those of `large_ids`, in runs of 9 tokens: one id has every second run, two others every fourth."""
    names = np.array([2**24, 2**24 + 1, 2**24, 2**24 + 2**16 + 1], np.int32)

    def ids(length: int) -> np.ndarray:
        return names[(np.arange(length) + np.arange(batch)[:, None]) // 9 % len(names)]

    return ids(rows), ids(columns)


def scattered_padding(batch: int, rows: int, columns: int) -> Pair:
    """Two documents, the second beginning later in each batch row, and padding (ids -1 and -2) among their tokens."""

    def ids(length: int) -> np.ndarray:
        token, row = np.arange(length), np.arange(batch)[:, None]
        return np.where((token + row) % 7 == 2, -1, np.where((token + row) % 9 == 5, -2, 2 * token >= length + 6 * row))

    return ids(rows).astype(np.int32), ids(columns).astype(np.int32)


FAR: Final = 2**24 + 2**15 - 20
"""From here on float32 cannot hold odd positions; 20 positions later their low 16 bits, if signed, turn negative."""


def far(batch: int, rows: int, columns: int) -> Pair:
    return np.arange(rows, dtype=np.int32) + FAR, np.arange(columns, dtype=np.int32) + FAR


def far_rows(batch: int, rows: int, columns: int) -> Pair:
    """Positions start at a different number in each batch row (below zero in the last); queries start after keys.

    How much later the queries start also differs by batch row, so that a tile that is skipped, or visible as a whole,
    in the first batch row may be partly visible in another.
    """
    row = np.arange(batch, dtype=np.int32)[:, None]
    starts = np.where(row == batch - 1, -33, FAR - 5 * row).astype(np.int32)
    later = 3 + (row + 1) % 3 * (rows // 5)
    return np.arange(rows, dtype=np.int32) + starts + later, np.arange(columns, dtype=np.int32) + starts


def later_rows(batch: int, rows: int, columns: int) -> Pair:
    """Query `i` of batch row `b` has position `i - 5 + 40 b`, and key `j` has position `j`.

    So under a causal mask a tile of any size that is invisible in batch row 0 may be visible in other batch rows, also
    in layouts that spread tokens over ranks.
    """
    q = np.arange(rows, dtype=np.int32) - 5 + 40 * np.arange(batch, dtype=np.int32)[:, None]
    return q, np.arange(columns, dtype=np.int32)[None].repeat(batch, 0)


def scattered(batch: int, rows: int, columns: int) -> Pair:
    """Consecutive positions in a mixed order: the first and last token of a tile do not bound its positions."""

    def of_length(length: int) -> np.ndarray:
        step = 23 if length % 23 else 29  # a step that divides the length would give several tokens the same position
        return (FAR + (step * np.arange(length) + 5) % length).astype(np.int32)

    return of_length(rows), of_length(columns)


def backward_rows(batch: int, rows: int, columns: int) -> Pair:
    """The positions of `far_rows` in descending order along the sequence."""
    q, kv = far_rows(batch, rows, columns)
    return q[:, ::-1], kv[:, ::-1]


def edge_ids(batch: int, rows: int, columns: int) -> Pair:
    """Random ids, among them the ends of int32 and their neighbours; every negative id, however low, is padding."""
    names = np.array([0, 1, 2**31 - 1, 2**31 - 2, 2**30, -1, -100, -101, -(2**31)])
    draw = np.random.default_rng(rows)
    q_ids, kv_ids = (names[draw.integers(0, len(names), (batch, length))] for length in (rows, columns))
    return q_ids.astype(np.int32), kv_ids.astype(np.int32)


def crossed(batch: int, rows: int, columns: int) -> Pair:
    return _documents(batch, rows, (0.5, 0.3)), _documents(batch, columns, (0.2, 0.3))


def restarting(batch: int, rows: int, columns: int) -> Pair:
    """Positions `[B, T]` that start again at 0 in each document of `packed`."""
    ids = _documents(batch, rows, (0.4, 0.3))
    starts = np.stack([np.searchsorted(row, row, side="left") for row in ids])
    place = (np.arange(rows)[None] - starts).astype(np.int32)
    return place, place[:, :columns]


def spread(batch: int, rows: int, columns: int) -> Pair:
    """Positions 1501 apart: half precision cannot hold their distances, and many distances overflow int16."""
    return 1501 * np.arange(rows, dtype=np.int32), 1501 * np.arange(columns, dtype=np.int32)


def extreme(batch: int, rows: int, columns: int) -> Pair:
    """Half of the positions near -2^30 and half near 2^30, the limits of allowed positions."""
    q, kv = np.arange(rows, dtype=np.int32), np.arange(columns, dtype=np.int32)
    far = np.int32(2**30 - 1)
    q = np.where(q < rows // 2, q - far, far - rows + 1 + q)
    return q, np.where(kv < columns // 2, kv - far, far - columns + 1 + kv)


def later_keys(batch: int, rows: int, columns: int) -> Pair:
    return np.arange(rows, dtype=np.int32), np.arange(columns, dtype=np.int32) + rows


def at_the_end(batch: int, rows: int, columns: int) -> Pair:
    """Queries are the last tokens of the keys' sequence, as in decoding."""
    return np.arange(rows, dtype=np.int32) + np.int32(columns - rows), np.arange(columns, dtype=np.int32)


def among_keys(batch: int, rows: int, columns: int) -> Pair:
    """Query positions start at two thirds of the key length, so that even a single query has keys on both sides."""
    return np.arange(rows, dtype=np.int32) + np.int32(2 * columns // 3), np.arange(columns, dtype=np.int32)


Range = tuple[Any, Any]
"""The first and the last key position that each query sees: numbers, or arrays `[T]`, `[B, T]` or `[b, N, T]`."""
DrawRange = Callable[[np.ndarray, np.ndarray, int, int], Range]
"""A function of query positions `[b, T]`, key positions `[b, S]`, the rows of the batch and the heads."""
LOWEST: Final = np.int32(-(2**31))
HIGHEST: Final = np.int32(2**31 - 1)


def _places(q: np.ndarray, kv: np.ndarray, batch: int) -> np.ndarray:
    """How many keys of its row lie before each query's own position, `[B, T]`: its place among the keys."""
    ordered = np.sort(kv, -1)
    return np.stack([np.searchsorted(ordered[row % len(kv)], q[row % len(q)]) for row in range(batch)])


def _positions_at(places: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """The positions of the keys at these places, `[B, T]` or `[B, N, T]`; beyond the ends, those of the end keys."""
    places, ordered = np.clip(places, 0, kv.shape[1] - 1), np.sort(kv, -1)
    return np.stack([ordered[row % len(kv)][of_row] for row, of_row in enumerate(places)]).astype(np.int32)


def _where_empty(empty: np.ndarray, first: np.ndarray, last: np.ndarray) -> Range:
    """The ranges, but empty ones where `empty`: by turns `last = first - 1`, or the extremes of int32."""
    far = np.arange(empty.shape[-1]) % 2 == 0
    lowest, highest = (np.where(empty & far, x, y) for x, y in ((HIGHEST, first), (LOWEST, last)))
    return lowest.astype(np.int32), np.where(empty & ~far, lowest.astype(np.int64) - 1, highest).astype(np.int32)


def numbers(q: np.ndarray, kv: np.ndarray, batch: int, heads: int) -> Range:
    """Two numbers: no query of any row sees the first and the last eighth of the keys of the first row."""
    ordered = np.sort(kv[0])
    return int(ordered[ordered.size // 8]), int(ordered[-1 - ordered.size // 8])


def spans(q: np.ndarray, kv: np.ndarray, batch: int, heads: int) -> Range:
    """Three unequal spans: a query sees the keys of its own span. `[T]` if all rows have the same positions."""
    rows, ends = max(len(q), len(kv)), kv.shape[1] * np.array([0, 1, 4, 6]) // 6
    span = np.searchsorted(ends[1:-1], np.minimum(_places(q, kv, rows), kv.shape[1] - 1), side="right")
    first, last = (_positions_at(ends[span + side] - side, kv) for side in (0, 1))
    return (first, last) if rows > 1 else (first[0], last[0])


def prefixes(q: np.ndarray, kv: np.ndarray, batch: int, heads: int) -> Range:
    """Each row of the batch has a prefix that all its queries see, and later queries see all keys up to their own."""
    lengths = kv.shape[1] * (2 + np.arange(batch)[:, None] % 3) // 6
    return LOWEST, _positions_at(np.maximum(_places(q, kv, batch), lengths - 1), kv)


def gaps(q: np.ndarray, kv: np.ndarray, batch: int, heads: int) -> Range:
    """Some keys around each query, `[B, T]`, other ones in each row; every fifth query has an empty range."""
    places, row, token = _places(q, kv, batch), np.arange(batch)[:, None], np.arange(q.shape[1])
    first, last = (_positions_at(places + reach, kv) for reach in (-16 + 5 * (row % 3), 4 + 7 * (row % 2) + token % 3))
    return _where_empty((token + row) % 5 == 2, first, last)


def of_heads(q: np.ndarray, kv: np.ndarray, batch: int, heads: int) -> Range:
    """Some keys around each query, `[b, N, T]`, other ones for each head; some heads have no bound on one side."""
    places, head = _places(q, kv, max(len(q), len(kv)))[:, None], np.arange(heads)[:, None]
    first, last = (_positions_at(places + reach, kv) for reach in (-5 - 6 * (head % 4), 19 - 5 * (head % 4)))
    return np.where(head % 3 == 1, LOWEST, first), np.where(head % 6 == 2, HIGHEST, last)


def of_rows_and_heads(q: np.ndarray, kv: np.ndarray, batch: int, heads: int) -> Range:
    """Some keys around each query, `[B, N, T]`, other ones for each row and head; some ranges are empty."""
    places, token = _places(q, kv, batch)[:, None], np.arange(q.shape[1])
    row, head = np.arange(batch)[:, None, None], np.arange(heads)[:, None]
    before, after = 4 + (7 * head + 11 * row + token // 8) % 23, 3 + (5 * row + 9 * head + token // 5) % 17
    first, last = _positions_at(places - before, kv), _positions_at(places + after, kv)
    return _where_empty((token + 2 * row + head) % 11 == 4, first, last)


Build = Callable[[int, int, int, int, int], Any]
"""A `mask_builder`: `(q_len, kv_len, num_heads, head_idx, num_reps) -> mask`."""


@dataclasses.dataclass(frozen=True)
class Builder:
    """A `mask_builder`, and the same mask for the oracle: whether query `i` of a head sees key `j`.

    `i` and `j` are positions, or count tokens if `by_index`.
    """

    build: Build
    seen: Callable[[Any, Any, int], Any]
    by_index: bool = False

    def dense(self, problem: Problem) -> np.ndarray:
        """The mask as an array `[B|1, N, T, S]`."""
        q, kv = positions(problem)
        if self.by_index:
            q, kv = (np.arange(x.shape[1])[None] for x in (q, kv))
        return self.at(q, kv, problem.q.shape[2])

    def at(self, q: np.ndarray, kv: np.ndarray, heads: int) -> np.ndarray:
        """The mask `[B, N, T, S]` of queries `[B, T]` and keys `[B, S]` at these positions or indices."""
        i, j = q[:, :, None], kv[:, None, :]
        shape = np.broadcast_shapes(i.shape, j.shape)
        return np.stack([np.broadcast_to(self.seen(i, j, head), shape) for head in range(heads)], 1)


_WINDOWS: Final = ((0, 0), (15, 3), (2, 40), (18, 40), (23, 40), (28, 40), (33, 40))


def _of_heads(q_len: int, kv_len: int, num_heads: int, head_idx: int, num_reps: int) -> masks.Mask:
    """Head `n` has number `n` modulo 7 of seven masks: more different masks than a kernel may have room for."""
    return masks.Causal() if head_idx % 7 == 0 else masks.Local(*_WINDOWS[head_idx % 7])


def _seen_by_heads(i: Any, j: Any, head: int) -> Any:
    left, right = _WINDOWS[head % 7]
    return j <= i if head % 7 == 0 else (j >= i - left) & (j <= i + right)


ALGEBRA: Final = ((masks.Prefix(7) | masks.Causal()) & ~masks.Local(2, 2)) | masks.Chunked(5)


def _seen_by_algebra(i: Any, j: Any, head: int) -> Any:
    near = (j >= i - 2) & (j <= i + 2)
    return (((j < 7) | (j <= i)) & ~near) | ((i // 5 == j // 5) & (j <= i))


def _scattered(i: Any, j: Any, head: int = 0) -> Any:
    return (i * 7 + j * 3) % 5 < 3


OF_HEADS: Final = (masks.Predicate(_scattered), masks.Local(25, 11), masks.Causal() & ~masks.Local(2, 2))


def _seen_by_thirds(i: Any, j: Any, head: int) -> Any:
    """The pairs that the masks of `OF_HEADS` allow, which heads have by turns; only one of the masks is an interval."""
    seen = _scattered(i, j), (j >= i - 25) & (j <= i + 11), (j <= i) & ((j < i - 2) | (j > i + 2))
    return seen[head % 3]


@dataclasses.dataclass(frozen=True)
class Indexed:
    """Stands for a mask of another library: an object with only a shape and indexing as in NumPy."""

    shape: tuple[int, int]

    def __getitem__(self, key: tuple[Any, Any]) -> np.ndarray:
        rows, columns = (np.broadcast_to(x, self.shape)[key] for x in np.ogrid[: self.shape[0], : self.shape[1]])
        return _scattered(rows, columns)


SEGMENTS: Final[dict[str, Draw]] = {
    "packed": packed, "padding": padding, "unseen-ranks": unseen_ranks, "padding-among-tokens": padding_among_tokens,
    "large-ids": large_ids, "interleaved": interleaved, "scattered-padding": scattered_padding, "crossed": crossed,
    "edge-ids": edge_ids,
}  # fmt: skip
POSITIONS: Final[dict[str, Draw]] = {
    "far": far, "far-rows": far_rows, "later-rows": later_rows, "scattered": scattered, "backward-rows": backward_rows,
    "restarting": restarting, "spread": spread, "extreme": extreme, "later-keys": later_keys, "at-the-end": at_the_end,
    "among-keys": among_keys,
}  # fmt: skip
RANGES: Final[dict[str, DrawRange]] = {
    "numbers": numbers, "spans": spans, "prefixes": prefixes, "gaps": gaps, "of-heads": of_heads,
    "of-rows-and-heads": of_rows_and_heads,
}  # fmt: skip
BUILDERS: Final = {
    "of-heads": Builder(_of_heads, _seen_by_heads),
    "thirds": Builder(lambda q_len, kv_len, heads, head, reps: OF_HEADS[head % 3], _seen_by_thirds),
    "algebra": Builder(lambda *_: ALGEBRA, _seen_by_algebra),
    "predicate": Builder(lambda *_: masks.Predicate(_scattered), _scattered),
    "indexed": Builder(lambda q_len, kv_len, *_: Indexed((q_len, kv_len)), _scattered, by_index=True),
}
