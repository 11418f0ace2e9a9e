# SPDX-License-Identifier: Apache-2.0
"""Promises of the mask algebra: which pairs are visible, which masks are intervals, and the laws of sets."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention
from ringattn_core.masks import (
    Causal,
    Chunked,
    Coordinates,
    Document,
    Full,
    Local,
    Mask,
    Numpy,
    Predicate,
    Prefix,
)
from ringattn_testing.rings import close, mesh_of, query_key_value

LENGTH = 24
IDS = np.repeat([0, 1, 0, 2, -1], [5, 7, 4, 5, 3])
KV_IDS = np.repeat([0, 1, 2, -1], [3, 9, 8, 4])
DENSE = np.random.default_rng(0).random((LENGTH, LENGTH)) < 0.4


def parity(i: Any, j: Any) -> Any:
    return (i + j) % 3 != 0


@dataclasses.dataclass(frozen=True)
class Distant(Mask):
    """A query sees keys at least `least` positions away: a mask of a caller's own, without an interval."""

    least: int

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return abs(q.positions - kv.positions) >= self.least


Definition = Callable[[int, int], bool]
BOUNDED: list[tuple[Mask, Definition]] = [
    (Full(), lambda i, j: True),
    (Causal(), lambda i, j: j <= i),
    (Causal(-1), lambda i, j: j <= i - 1),
    (Causal(3), lambda i, j: j <= i + 3),
    (Local(2, 3), lambda i, j: i - 2 <= j <= i + 3),
    (Local(4, None), lambda i, j: i - 4 <= j),
    (Local(None, 0), lambda i, j: j <= i),
    (Local(0, 0), lambda i, j: i == j),
    (Local(), lambda i, j: True),
    (Chunked(4), lambda i, j: i // 4 == j // 4 and j <= i),
    (Chunked(1), lambda i, j: i == j),
    (Prefix(5), lambda i, j: j < 5),
]
BY_INDEX: list[tuple[Mask, Definition]] = [
    (Document(IDS), lambda i, j: IDS[i] == IDS[j] and IDS[i] >= 0),
    (Document(IDS, KV_IDS), lambda i, j: IDS[i] == KV_IDS[j] and IDS[i] >= 0),
    (Numpy(DENSE), lambda i, j: DENSE[i, j]),
    (Predicate(parity), lambda i, j: (i + j) % 3 != 0),
]
COMPOUND: list[tuple[Mask, Definition]] = [
    (Causal() & Document(IDS), lambda i, j: j <= i and IDS[i] == IDS[j] and IDS[i] >= 0),
    (Prefix(4) | Causal(), lambda i, j: j < 4 or j <= i),
    (~Local(3, 3), lambda i, j: abs(i - j) > 3),
    (~(Causal() & ~Numpy(DENSE)) & Chunked(8), lambda i, j: (DENSE[i, j] or j > i) and i // 8 == j // 8 and j <= i),
]
EVERY = BOUNDED + BY_INDEX + COMPOUND


def named(cases: list[tuple[Mask, Definition]]) -> Any:
    return pytest.mark.parametrize(("mask", "definition"), cases, ids=[str(mask) for mask, _ in cases])


def natural(length: int = LENGTH) -> Coordinates:
    index = np.arange(length, dtype=np.int32)
    return Coordinates(index, index)


def on_device(where: Coordinates) -> Coordinates:
    return Coordinates(*(jnp.asarray(x) for x in where))


def seen(mask: Mask, q: Coordinates, kv: Coordinates) -> np.ndarray:
    """Which pairs are visible, as a dense array."""
    pairs = np.asarray(mask.visible(q.rows(), kv.columns()))
    return np.broadcast_to(pairs, (*np.shape(q.positions), kv.index.shape[-1]))


def tiled(where: Coordinates, size: int) -> Coordinates:
    return Coordinates(*(x.reshape(1, -1, size) for x in where))


def by_tile(pairs: np.ndarray, q_size: int, kv_size: int) -> np.ndarray:
    rows, columns = pairs.shape
    return pairs.reshape(rows // q_size, q_size, columns // kv_size, kv_size).swapaxes(1, 2)


class TestVisible:
    @named(EVERY)
    @pytest.mark.parametrize("place", [on_device, lambda where: where], ids=["jax", "numpy"])
    def test_visible_is_the_set_of_the_definition(self, mask: Mask, definition: Definition, place: Any) -> None:
        where = place(natural())
        expected = [[bool(definition(i, j)) for j in range(LENGTH)] for i in range(LENGTH)]
        np.testing.assert_array_equal(seen(mask, where, where), expected)

    @named(BOUNDED)
    def test_it_compares_positions_and_not_indices(self, mask: Mask, definition: Definition) -> None:
        rng = np.random.default_rng(1)
        q_positions, kv_positions = rng.integers(-20, 40, (2, LENGTH)).astype(np.int32)
        index = natural().index
        got = seen(mask, Coordinates(q_positions, index), Coordinates(kv_positions, index))
        np.testing.assert_array_equal(got, [[definition(int(i), int(j)) for j in kv_positions] for i in q_positions])

    @named([BY_INDEX[0], BY_INDEX[1], BY_INDEX[2]])
    def test_arrays_are_addressed_by_index_and_not_by_position(self, mask: Mask, definition: Definition) -> None:
        where = natural()
        elsewhere = Coordinates(where.positions * 0 + 7, where.index)
        np.testing.assert_array_equal(seen(mask, elsewhere, elsewhere), seen(mask, where, where))


INTERVALS: list[tuple[Mask, Definition]] = [
    *BOUNDED,
    *COMPOUND[1:2],
    (Document(np.arange(LENGTH) // 7), lambda i, j: i // 7 == j // 7),
    (Document(np.arange(LENGTH) // 5 - 1), lambda i, j: i // 5 == j // 5 >= 1),
    (Document(IDS, np.sort(KV_IDS)), lambda i, j: IDS[i] == np.sort(KV_IDS)[j] and IDS[i] >= 0),
    (
        Document([4, 9, 2] * 8, [2] * 8 + [-1] * 9 + [4] * 7),
        lambda i, j: i % 3 == (2 if j < 8 else 0 if j >= 17 else 9),
    ),
    (Causal() & Local(3, None), lambda i, j: i - 3 <= j <= i),
    (Prefix(9) & Local(4, 4), lambda i, j: j < 9 and abs(i - j) <= 4),
    (Local(2, 0) | Document(np.arange(LENGTH) // 6), lambda i, j: i - 2 <= j <= i or i // 6 == j // 6),
    (Causal() & (Local(5, 0) | Chunked(12)), lambda i, j: j <= i and (i - 5 <= j or i // 12 == j // 12)),
    (~Causal(), lambda i, j: j > i),
    (~Prefix(7) & Causal(2), lambda i, j: 7 <= j <= i + 2),
    (~Local(None, 3) | ~Causal(9), lambda i, j: j > i + 3 or j > i + 9),
]


class TestIntervals:
    @named(INTERVALS)
    def test_an_interval_is_the_mask(self, mask: Mask, definition: Definition) -> None:
        where = on_device(natural())
        interval = mask.interval(where, True)
        assert interval is not None
        first, last = ((None if x is None else np.asarray(x)[:, None]) for x in interval)
        got = np.ones((LENGTH, LENGTH), bool)
        got &= True if first is None else np.arange(LENGTH) >= first
        got &= True if last is None else np.arange(LENGTH) <= last
        np.testing.assert_array_equal(got, [[bool(definition(i, j)) for j in range(LENGTH)] for i in range(LENGTH)])

    @named(INTERVALS + EVERY)
    def test_what_a_mask_says_of_itself_is_true(self, mask: Mask, definition: Definition) -> None:
        where = on_device(natural())
        pairs = np.array([[bool(definition(i, j)) for j in range(LENGTH)] for i in range(LENGTH)])
        assert pairs.diagonal().all() or not mask.contains_own
        low, high = mask.reach.bounds(natural().positions[:, None])
        reached = np.ones((LENGTH, LENGTH), bool) & (True if low is None else np.arange(LENGTH) >= low)
        assert not (pairs & ~(reached & (True if high is None else np.arange(LENGTH) <= high))).any()
        if mask.monotone:
            interval = mask.interval(where, True)
            assert interval is not None
            assert all(x is None or (np.diff(np.asarray(x)) >= 0).all() for x in interval)

    def test_masks_that_no_two_positions_bound_have_no_interval(self) -> None:
        where = on_device(natural())
        loose = [
            Document(IDS), Numpy(DENSE), Predicate(parity), Distant(2), ~Local(3, 3), Prefix(3) | Local(1, 0),
            Causal() & Numpy(DENSE), Causal() | Predicate(parity), ~Document(np.arange(LENGTH) // 7), ~Full(),
            Chunked(4) | ~Causal(),
        ]  # fmt: skip
        assert [mask.interval(where, True) for mask in loose] == [None] * len(loose)
        assert Document(np.arange(LENGTH) // 7).interval(where, False) is None

    @pytest.mark.parametrize("mask", [~Distant(3), Causal() & Distant(4)], ids=repr)
    def test_a_ring_takes_masks_of_the_callers_own_classes(self, mask: Mask) -> None:
        operands, ring = query_key_value(1, LENGTH, 2, 2), {"mesh": mesh_of(sp=4), "axis_name": "sp"}
        dense = jnp.asarray(seen(mask, natural(), natural()))[None, None]
        got = ring_attention(*operands, mask_builder=lambda *_: mask, **ring)
        close(got, ring_attention(*operands, attention_mask=dense))


class TestIdentity:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: Document(IDS.copy(), KV_IDS.tolist()),
            lambda: Causal(2) & ~Numpy(DENSE.copy()) | Predicate(parity),
        ],
    )
    def test_masks_made_alike_are_equal_and_hash_equal(self, make: Callable[[], Mask]) -> None:
        assert make() == make()
        assert hash(make()) == hash(make())

    def test_masks_that_differ_are_not_equal(self) -> None:
        masks = [Causal(), Causal(1), Local(1, 2), Local(2, 1), Chunked(4), Prefix(4), Document(IDS, KV_IDS)]
        masks += [Document(IDS), Numpy(DENSE), Numpy(~DENSE), Numpy(DENSE.reshape(12, 48))]
        masks += [~Causal(), Causal() & Full(), Causal() | Full()]
        assert all((a == b) == (i == j) for i, a in enumerate(masks) for j, b in enumerate(masks))

    def test_a_mask_does_not_follow_the_array_it_was_made_from(self) -> None:
        ids, dense = IDS.copy(), DENSE.copy()
        document, held = Document(ids), Numpy(dense)
        ids[:], dense[:] = 0, True
        assert document == Document(IDS)
        np.testing.assert_array_equal(seen(held, natural(), natural()), DENSE)


@pytest.mark.parametrize("offset", [2**31 - 1, 2**31 - 32, -(2**31), -(2**30)])
def test_the_farthest_offsets_do_not_wrap(offset: int) -> None:
    mask, where = Causal(offset), natural(64)
    first, last = mask.interval(on_device(where), True) or (None, None)
    visible = np.asarray(mask.visible(where.rows(), where.columns()))
    np.testing.assert_array_equal(visible, np.arange(64) <= np.arange(64)[:, None] + offset)
    assert first is None and last is not None
    np.testing.assert_array_equal(visible, np.arange(64) <= np.asarray(last)[:, None])
