# SPDX-License-Identifier: Apache-2.0
"""The plan leaves out hops and rows that no query can use; its sends bring every key and take every gradient home."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.call.validation import validated
from ringattn_core.masks import Causal, Chunked, Document, Local, Mask, Predicate, Prefix, Reach
from ringattn_core.placement.layout import LAYOUTS, Shards
from ringattn_core.ring.plan import MOST_TILES, Level, levels, rows_seen

REACHES = {
    "full": Reach(),
    "causal": Reach(causal=True),
    "window": Reach(left=5, right=5),
    "causal window": Reach(True, 5, 5),
    "left of one shard": Reach(True, 4, 0),
    "future only": Reach(right=3),
    "strictly before": Reach(right=-3),
    "chunk": Reach(chunk=8),
    "small chunk": Reach(chunk=3),
    "chunk in a window": Reach(left=2, chunk=8),
}


def seen(reach: Reach, layout: str, ranks: int, q_length: int, kv_length: int) -> set[tuple[int, int]]:
    """The offsets at which some pair is visible, and the rows of its keys in their shard, by the dense mask."""
    q, kv = (Shards(layout, ranks).order(ranks * n) for n in (q_length, kv_length))
    q, dense = q[:, None], np.ones((len(q), len(kv)), bool)
    if reach.causal or reach.chunk:
        dense &= kv <= q
    if reach.chunk:
        dense &= kv // reach.chunk == q // reach.chunk
    for side, apart in ((reach.left, q - kv), (reach.right, kv - q)):
        dense &= True if side is None else apart <= side
    reader, owner, row = np.nonzero(dense.reshape(ranks, q_length, ranks, kv_length).any(1))
    return {(int(offset), int(row)) for offset, row in zip((reader - owner) % ranks, row, strict=True)}


@pytest.mark.parametrize("name", REACHES)
def test_in_the_contiguous_layout_no_other_hop_is_made(name: str):
    for ranks, q_length, kv_length in itertools.product((2, 3, 4, 8), (2, 4), (2, 4, 6)):
        made = set(rows_seen(REACHES[name], Shards("contiguous", ranks), (q_length, kv_length)))
        assert made == {offset for offset, _ in seen(REACHES[name], "contiguous", ranks, q_length, kv_length)} | {0}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", REACHES)
def test_every_row_that_some_query_sees_travels(name: str, layout: str):
    for ranks, q_length, kv_length in itertools.product((2, 3, 4, 8), (2, 4, 16), (2, 6, 12)):
        rows = rows_seen(REACHES[name], Shards(layout, ranks), (q_length, kv_length))
        for offset, row in seen(REACHES[name], layout, ranks, q_length, kv_length):
            assert rows[offset][0] <= row < rows[offset][1]


@pytest.mark.parametrize(
    ("layout", "window", "rows"),
    [
        ("contiguous", (5, 0), {1: (11, 16)}),
        ("contiguous", (5, 3), {1: (11, 16), 7: (0, 3)}),
        ("contiguous", (20, 0), {1: (0, 16), 2: (12, 16)}),
        ("zigzag", (5, 0), {1: (3, 8), 7: (11, 16)}),
    ],
)
def test_of_a_window_only_the_rows_within_its_reach_travel(
    layout: str, window: tuple[int, int], rows: dict[int, tuple[int, int]]
):
    """Contiguous shards send their end. In zigzag order both chunks do: one onward, the other back."""
    (level,) = levels(Reach(False, *window), Shards(layout, 8), (16, 16), ("sp",), (8,))
    assert dict(zip(level.distances[1:], level.rows[1:], strict=True)) == rows
    assert [(hop.key_shift, hop.next_rows) for hop in level.forward_hops[:-1]] == [*rows.items()]
    assert [hop.gradient_shift for hop in level.backward_hops] == [None, *(-distance for distance in rows)]


def test_a_ring_of_two_sends_only_the_rows_that_its_window_sees():
    (level,) = levels(Reach(left=5, right=0), Shards("contiguous", 2), (16, 16), ("sp",), (2,))
    assert level.rows == ((0, 16), (11, 16))
    (level,) = levels(Reach(causal=True), Shards("contiguous", 2), (16, 16), ("sp",), (2,))
    assert level.rows is None


def test_long_shards_send_whole_tiles():
    (level,) = levels(Reach(left=1000, right=0), Shards("contiguous", 4), (32768, 32768), ("sp",), (4,))
    assert level.rows == ((0, 32768), (32768 - 1024, 32768)) and MOST_TILES == 64


def reach_with(*masks: Mask, **options: Any) -> Reach:
    """The reach by which the ring of a call with a mask for each head, and with these options, leaves out hops."""
    x = jnp.ones((1, 32, max(len(masks), 1), 4))
    builder = {"mask_builder": lambda t, s, heads, head, group: masks[head]} if masks else {}
    return validated(x, x, x, ranks=1, **builder, **options).reach_of_hops


def test_positions_of_the_callers_own_rule_out_nothing():
    assert reach_with(sliding_window=(1, 0), q_positions=np.arange(32)) == Reach()
    assert reach_with(Local(1, 0), query_offset=3) == Reach()


def test_a_promise_and_masks_of_positions_leave_out_hops_and_other_masks_do_not():
    assert reach_with(Local(4, None), sliding_window=(9, 0), max_distance=(7, 0)) == Reach(left=4, right=0)
    assert reach_with(query_offset=3, causal=True, max_distance=4) == Reach(left=4, right=4)
    assert reach_with(Local(9, 2), causal=True) == Reach(True, 9, 2)
    assert reach_with(Causal() & Local(3, None), Causal() & Chunked(8)).sides == (7, 0)
    assert reach_with(Local(3, 0) | Local(1, 2)).sides == (3, 2)
    for loose in (Predicate(lambda i, j: i == j), Document(np.arange(32) // 4), ~Local(1, 1), Local(1, 1) | Prefix(2)):
        assert reach_with(loose) == reach_with(Local(1, 1), loose) == Reach()


def test_one_query_a_rank_cannot_be_cut_and_need_not_be_where_nothing_is_left_out():
    assert rows_seen(Reach(), Shards("zigzag", 4), (1, 8)) == dict.fromkeys(range(4), (0, 8))


def test_a_ring_has_one_level_with_axes_of_one_rank_or_hops_to_leave_out():
    def made(reach: Reach, axis: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Level, ...]:
        return levels(reach, Shards("contiguous", int(np.prod(sizes))), (4, 4), axis, sizes)

    whole, window, own = Reach(), Reach(left=4, right=0), Reach(chunk=4)
    assert [level.ranks for level in made(whole, ("a", "b"), (2, 4))] == [4, 2]
    assert [(level.axis, level.ranks) for level in made(window, ("a", "b"), (2, 4))] == [(("a", "b"), 8)]
    assert made(whole, ("a", "b"), (1, 8)) == (Level(("b",), 8, tuple(range(8))),)
    assert made(whole, ("a",), (1,)) == made(own, ("a",), (8,)) == ()


def test_more_hops_than_are_unrolled_are_passed_on_also_where_others_are_left_out():
    (level,) = levels(Reach(left=40, right=0), Shards("contiguous", 16), (4, 4), ("sp",), (16,))
    assert level.distances == tuple(range(11)) and level.rows is None
