# SPDX-License-Identifier: Apache-2.0
"""Promises of `Reach`: causality, window and chunk allow the keys between them, at the ends of int32 too."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.masks import Reach

FARTHEST = 2**31 - 1
SIDES = (None, 0, 1, 5, 2**30, FARTHEST - 1, FARTHEST)
WINDOWS = [{"sliding_window": sides, "causal": causal} for *sides, causal in itertools.product(SIDES, SIDES, (0, 1))]
CHUNKS = [
    {"chunk_size": size, "sliding_window": sides}
    for size in (1, 3, 16, 2**30 - 1, 2**30)
    for sides in (None, (0, None), (2, 0), (None, 1), (FARTHEST, FARTHEST))
]
OF_CALLER = [x for end in (1 - 2**30, -16, 0, 15, 2**30 - 4) for x in range(end, end + 4)]
"""Positions that a caller may pass."""
ANY = [-(2**31), 1 - 2**31, *OF_CALLER, FARTHEST - 1, FARTHEST]


def sees(i: int, j: int, causal: Any = False, sliding_window: Any = None, chunk_size: Any = None) -> bool:
    """The definition, in Python's integers."""
    left, right = sliding_window or (None, None)
    if chunk_size is not None and i // chunk_size != j // chunk_size:
        return False
    if (causal or chunk_size is not None) and j > i:
        return False
    return (left is None or i - left <= j) and (right is None or j <= i + right)


def reach(causal: Any = False, sliding_window: Any = None, chunk_size: Any = None) -> Reach:
    return Reach(bool(causal), *(sliding_window or (None, None)), chunk_size)


def within(options: dict[str, Any], positions: Any, keys: np.ndarray) -> np.ndarray:
    low, high = reach(**options).bounds(positions)
    seen = np.ones((len(positions), len(keys)), bool)
    for bound in (low, high):
        assert bound is None or (bound.dtype == np.int32 and type(bound) is type(positions))
    seen &= True if low is None else np.asarray(low)[:, None] <= keys
    return seen & (True if high is None else keys <= np.asarray(high)[:, None])


@pytest.mark.parametrize("on", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_query_sees_the_keys_between_its_bounds(on: Any):
    for options, positions in [(x, ANY) for x in WINDOWS] + [(x, OF_CALLER) for x in CHUNKS]:
        left, right = options["sliding_window"] or (None, None)
        edges = {i + step for i in positions for step in (-(left or 0) - 1, -(left or 0), right or 0, (right or 0) + 1)}
        keys = sorted(j for j in edges.union(positions) if -(2**31) <= j < 2**31)
        seen = within(options, on(np.array(positions, np.int32)), np.array(keys, np.int32))
        np.testing.assert_array_equal(seen, [[sees(i, j, **options) for j in keys] for i in positions], str(options))


@pytest.mark.parametrize(("cases", "positions"), [(WINDOWS, ANY), (CHUNKS, OF_CALLER)], ids=["windows", "chunks"])
def test_a_query_is_within_its_bounds_and_neither_falls_where_positions_grow(
    cases: list[dict[str, Any]], positions: list[int]
):
    for options in cases:
        low, high = reach(**options).bounds(np.array(sorted(positions), np.int32))
        if low is not None:
            assert (low <= sorted(positions)).all() and (low[:-1] <= low[1:]).all(), options
        if high is not None:
            assert (high >= sorted(positions)).all() and (high[:-1] <= high[1:]).all(), options


def test_the_span_is_the_most_keys_that_a_query_sees():
    for causal, left, right, chunk in itertools.product((False, True), (None, 0, 3), (None, 0, 2), (None, 1, 4, 7)):
        options = {"causal": causal, "sliding_window": (left, right), "chunk_size": chunk}
        bounded = chunk is not None or (left is not None and (causal or right is not None))
        most = max(sum(sees(i, j, **options) for j in range(-50, 50)) for i in range(14)) if bounded else 2**30
        assert reach(**options).span == most, options
    assert Reach(left=FARTHEST, right=FARTHEST).span == Reach(chunk=2**30).span == Reach(causal=True).span == 2**30


REACHES = [
    Reach(*fields) for fields in itertools.product((False, True), (None, 0, 3), (None, 0, 2, -2), (None, 1, 4, 6))
]


def pairs_of(reach: Reach) -> np.ndarray:
    """Which of 24 positions see which, as a dense array."""
    low, high = reach.bounds(np.arange(24, dtype=np.int32)[:, None])
    keys, every = np.arange(24), np.ones((24, 24), bool)
    return every & (True if low is None else keys >= low) & (True if high is None else keys <= high)


def test_both_of_two_reaches_contain_their_intersection_and_either_their_union():
    for a, b in itertools.product(REACHES, REACHES):
        both = pairs_of(a) & pairs_of(b)
        assert not (both & ~pairs_of(a & b)).any(), (a, b)
        assert not ((pairs_of(a) | pairs_of(b)) & ~pairs_of(a | b)).any(), (a, b)
        if None in (a.chunk, b.chunk) or a.chunk == b.chunk:
            np.testing.assert_array_equal(pairs_of(a & b), both, str((a, b)))


def test_no_query_sees_farther_than_the_sides_of_its_reach():
    for reach in REACHES:
        (left, right), (i, j) = reach.sides, np.nonzero(pairs_of(reach))
        assert left is None or not i.size or (i - j).max() <= left, reach
        assert right is None or not i.size or (j - i).max() <= right, reach
