# SPDX-License-Identifier: Apache-2.0
"""How evenly packed documents keep the ranks of a ring busy, and rows of documents that keep them busy.

Work is counted in pairs of a query and a key that it sees, of causal attention within documents.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from ringattn_core.errors import InputError
from ringattn_core.integers import INT32, integers, whole
from ringattn_core.placement.layout import LAYOUTS, Shards, canonical, pieces, refuse_indivisible

EVEN: Final = 1.1
"""`pack` stops where the busiest rank has at most this many times the mean work of a rank."""
_TRIALS: Final = 1000
"""How many exchanges of two documents, and moves of one, `pack` tries in a row of documents."""


def pairs(lengths: Sequence[int], length: int, ring: int, layout: str = "contiguous") -> np.ndarray:
    """How many pairs the queries of rank `i` have with the keys of rank `j`, `[i, j]`.

    A row of `length` tokens holds documents of these `lengths`, one after another, and padding after them.
    """
    layout, documents = canonical(layout), _checked(lengths, length, ring)
    if documents.sum() > length:
        fact = f"have {documents.sum()} tokens together, and a row {length}"
        raise InputError("lengths", fact, "Pass fewer documents, or a longer row")
    refuse_indivisible("length", length, layout, ring)
    rank = np.empty(length, np.int64)
    rank[Shards(layout, ring).order(length)] = np.repeat(np.arange(ring), length // ring)
    tokens = int(documents.sum())
    first, rank = np.repeat(np.cumsum(documents) - documents, documents), rank[:tokens]
    found = np.zeros((ring, ring))
    for keys in range(ring):
        before = np.append(0, np.cumsum(rank == keys))  # how many tokens before each one this rank holds
        found[:, keys] = np.bincount(rank, before[1:] - before[first], ring)
    return found


def busy(lengths: Sequence[int], length: int, ring: int) -> dict[str, float]:
    """The share of the time in which ranks compute, if every hop waits for its busiest rank, for each layout.

    Layouts that cannot split `length` tokens are left out.
    """
    _checked(lengths, length, ring)
    shares = {}
    for layout in (layout for layout in LAYOUTS if length % (ring * pieces(layout)) == 0):
        of_ranks, rank = pairs(lengths, length, ring, layout), np.arange(ring)
        slowest = sum(of_ranks[rank, (rank - hop) % ring].max() for hop in range(ring))
        shares[layout] = float(of_ranks.sum() / (ring * slowest)) if slowest else 1.0
    return shares


@dataclasses.dataclass(frozen=True)
class Packing:
    """Documents in rows of `length` tokens, in contiguous order.

    `rows` has, for each row, the pairs of the number of a document and its first token in the row, in order; other
    tokens are padding. `reached` has, for each row, the work of the busiest rank over the mean of all ranks.
    """

    lengths: tuple[int, ...]
    length: int
    ring: int
    rows: tuple[tuple[tuple[int, int], ...], ...]
    reached: tuple[float, ...]

    @property
    def segment_ids(self) -> np.ndarray:
        """For each token of each row, the number of its document; -1 for padding."""
        ids = np.full((len(self.rows), self.length), -1, np.int32)
        for row, places in zip(ids, self.rows, strict=True):
            for number, start in places:
                row[start : start + self.lengths[number]] = number
        return ids

    def __str__(self) -> str:
        even, worst = sum(reached <= EVEN for reached in self.reached), max(self.reached)
        filled = sum(self.lengths) / (len(self.rows) * self.length)
        return (
            f"{len(self.lengths)} documents in {len(self.rows)} rows, {100 * filled:.1f}% full. In {even} rows the "
            f"busiest of {self.ring} ranks has at most {EVEN} times the mean; in the worst, {worst:.2f} times"
        )


def pack(lengths: Sequence[int], length: int, ring: int) -> Packing:
    """Places documents into few rows of `length` tokens so that the ranks of each row have nearly the same work.

    Long documents go first, each into the fullest row that has room. The order in a row, with padding between
    documents, is found by exchanges, until the busiest rank has at most `EVEN` times the mean. A row of a document that
    is much longer than a shard cannot reach that: the last rank of the document sees the most keys. The result is the
    same in every run.
    """
    documents = _checked(lengths, length, ring)
    if length % ring:
        fact = f"got {length}, which a ring of {ring} ranks does not divide"
        raise InputError("length", fact, f"Pass {-(-length // ring) * ring}")
    if documents.size == 0:
        raise InputError("lengths", "there are none", "Pass the number of tokens of each document")
    longest = int(documents.argmax())
    if documents[longest] > length:
        fact = f"document {longest} has {documents[longest]} tokens, and a row {length}"
        raise InputError("lengths", fact, "Split it, or pass longer rows")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # the free tokens of each row, and its number, sorted
    for number in np.argsort(-documents, kind="stable").tolist():
        size = int(documents[number])
        at = bisect.bisect_left(room, (size, 0))
        free, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        bisect.insort(room, (free - size, row))
    placed = [_arranged(row, documents, length, ring) for row in rows]
    return Packing(
        tuple(documents.tolist()), length, ring, tuple(places for places, _ in placed), tuple(r for _, r in placed)
    )


def _arranged(
    row: Sequence[int], documents: np.ndarray, length: int, ring: int
) -> tuple[tuple[tuple[int, int], ...], float]:
    """The documents of a row in order, each with its first token, and the work of the busiest rank over the mean."""
    free = length - int(documents[row].sum())
    padding = np.diff(np.linspace(0, free, ring + 1).astype(np.int64))
    sizes, real = np.append(documents[row], padding), np.append(np.ones(len(row), bool), np.zeros(ring, bool))
    order, draw = _dealt(sizes, real, ring), np.random.default_rng(0)

    loads = _loads(sizes[order], real[order], length, ring)
    for first, second, moves in draw.integers(len(order), size=(_TRIALS, 3)):
        if loads.max() * ring <= EVEN * loads.sum():
            break
        tried = order.copy()
        if moves % 2:
            tried = np.insert(np.delete(tried, first), second, order[first])
        else:
            tried[[first, second]] = tried[[second, first]]
        reached = _loads(sizes[tried], real[tried], length, ring)
        if (reached.max(), np.square(reached).sum()) <= (loads.max(), np.square(loads).sum()):
            order, loads = tried, reached
    starts = np.cumsum(sizes[order]) - sizes[order]
    places = ((row[item], int(start)) for item, start in zip(order.tolist(), starts, strict=True) if real[item])
    return tuple(places), float(loads.max() * ring / loads.sum())


def _dealt(sizes: np.ndarray, real: np.ndarray, ring: int) -> np.ndarray:
    """A first order: the longest document goes to the rank with the least work among those with room for it."""
    tokens, work, ranks = np.zeros(ring), np.zeros(ring), [[] for _ in range(ring)]
    for item in np.argsort(-sizes, kind="stable"):
        rank = int(np.where(tokens + sizes[item] <= sizes.sum() // ring, work, np.inf).argmin())
        ranks[rank].append(item)
        tokens[rank] += sizes[item]
        work[rank] += sizes[item] ** 2 * real[item]
    return np.concatenate([np.array(items, int) for items in ranks])


def _loads(sizes: np.ndarray, real: np.ndarray, length: int, ring: int) -> np.ndarray:
    """The pairs of each rank in contiguous order, for items one after another; padding is not `real`."""
    ends, each = np.cumsum(sizes), sizes * (sizes + 1) // 2 * real
    bounds = np.arange(1, ring) * (length // ring)
    item = np.searchsorted(ends, bounds, side="right")
    inside = bounds - (ends - sizes)[item]
    before = np.append(0, np.cumsum(each))[item] + inside * (inside + 1) // 2 * real[item]
    return np.diff(before, prepend=0, append=each.sum()).astype(float)


def _checked(lengths: Any, length: Any, ring: Any) -> np.ndarray:
    """The lengths of documents as an array. Raises unless they, a row and a ring are integers of at least 1."""
    for argument, x in (("length", length), ("ring", ring)):
        whole(argument, x, 1)
    documents = np.asarray(integers("lengths", lengths, INT32) if np.size(lengths) else (), np.int64)
    if documents.ndim != 1 or (documents < 1).any():
        raise InputError("lengths", f"got {lengths!r}"[:100], "Pass the number of tokens of each document, 1 or more")
    return documents
