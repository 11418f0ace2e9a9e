# SPDX-License-Identifier: Apache-2.0
"""Promises of the mask algebra: which pairs and which tiles are visible, and the laws of sets."""

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
    same_segment,
)
from rings import close, mesh_of, query_key_value

LENGTH = 24
IDS = np.repeat([0, 1, 0, 2, -1], [5, 7, 4, 5, 3])
KV_IDS = np.repeat([0, 1, 2, -1], [3, 9, 8, 4])
DENSE = np.random.default_rng(0).random((LENGTH, LENGTH)) < 0.4


def parity(i: Any, j: Any) -> Any:
    return (i + j) % 3 != 0


@dataclasses.dataclass(frozen=True)
class Distant(Mask):
    """A query sees keys at least `least` positions away: a mask of a caller's own, without `tiles`."""

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


class TestTiles:
    @named([*BOUNDED, BY_INDEX[2], BY_INDEX[3]])
    @pytest.mark.parametrize("sizes", [(1, 1), (4, 6), (24, 2)])
    @pytest.mark.parametrize("offset", [0, 5, 24])
    def test_they_are_exact_for_consecutive_positions(
        self, mask: Mask, definition: Definition, sizes: tuple[int, int], offset: int
    ) -> None:
        q, kv = Coordinates(natural().positions + np.int32(offset), natural().index), natural()
        some, every = mask.tiles(tiled(q, sizes[0]), tiled(kv, sizes[1]))
        truth = by_tile(seen(mask, q, kv), *sizes)
        np.testing.assert_array_equal(np.asarray(some)[0], truth.any((-2, -1)))
        np.testing.assert_array_equal(np.asarray(every)[0], truth.all((-2, -1)))

    def test_a_compound_is_bounded_where_all_its_parts_are(self) -> None:
        assert (Causal() & ~Local(1, 1) | Document(IDS)).bounded
        for loose in (Numpy(DENSE), Predicate(parity)):
            assert not (Causal() & loose).bounded
            assert not (loose | Causal()).bounded
            assert not (~loose).bounded

    @pytest.mark.parametrize("mask", [~Distant(3), Causal() & Distant(4)], ids=repr)
    def test_a_ring_takes_masks_of_the_callers_own_classes(self, mask: Mask) -> None:
        operands, ring = query_key_value(1, LENGTH, 2, 2), {"mesh": mesh_of(sp=4), "axis_name": "sp"}
        dense = jnp.asarray(seen(mask, natural(), natural()))[None, None]
        got = ring_attention(*operands, mask_builder=lambda *_: mask, **ring)
        close(got, ring_attention(*operands, attention_mask=dense))

    def test_segments_that_meet_in_one_id_may_see_each_other(self) -> None:
        q, kv = np.array([[[0, 0], [1, 2], [-1, -1]]]), np.array([[[0, 0], [2, 3], [-1, -1]]])
        some, every = same_segment(q, kv)
        np.testing.assert_array_equal(some[0], [[1, 0, 0], [0, 1, 0], [0, 0, 0]])
        np.testing.assert_array_equal(every[0], [[1, 0, 0], [0, 0, 0], [0, 0, 0]])


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
def test_tiles_of_the_farthest_offsets_are_what_is_visible(offset: int) -> None:
    mask, where = Causal(offset), Coordinates(np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int32))
    tiles = Coordinates(*(x.reshape(1, -1, 16) for x in where))
    some, every = mask.tiles(tiles, tiles)
    visible = np.asarray(mask.visible(where.rows(), where.columns()))
    assert (np.asarray(some) == visible.any()).all() and (np.asarray(every) == visible.all()).all()
