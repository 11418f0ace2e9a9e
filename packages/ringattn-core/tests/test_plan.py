# SPDX-License-Identifier: Apache-2.0
"""The plan leaves out hops and rows that no query can use; its sends bring every key and take every gradient home."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import masks
from ringattn_core.call.validation import validated
from ringattn_core.contract.rule import Rule
from ringattn_core.masks import Coordinates
from ringattn_core.placement.layout import LAYOUTS, Shards
from ringattn_core.ring.plan import MOST_TILES, Level, levels, rows_seen

RULES = {
    "full": Rule(1.0),
    "causal": Rule(1.0, causal=True),
    "window": Rule(1.0, sliding_window=(5, 5)),
    "causal window": Rule(1.0, causal=True, sliding_window=(5, 5)),
    "left of one shard": Rule(1.0, causal=True, sliding_window=(4, 0)),
    "future only": Rule(1.0, sliding_window=(None, 3)),
    "chunk": Rule(1.0, chunk_size=8),
    "small chunk": Rule(1.0, chunk_size=3),
    "documents in any order": Rule(1.0, masks=(masks.Document(np.arange(48) * 5 % 7),), mask_of_head=(0,)),
    "prefix": Rule(1.0, masks=(masks.Prefix(6),), mask_of_head=(0,)),
    "causal or prefix": Rule(1.0, masks=(masks.Causal() | masks.Prefix(2), masks.Local(1, 0)), mask_of_head=(0, 1)),
}


def seen(rule: Rule, layout: str, ranks: int, q_length: int, kv_length: int) -> set[tuple[int, int]]:
    """The offsets at which some pair is visible, and the rows of its keys in their shard, by the dense mask."""
    q, kv = (Shards(layout, ranks).order(ranks * n) for n in (q_length, kv_length))
    rows, columns = Coordinates(q, q).rows(), Coordinates(kv, kv).columns()
    dense = np.ones((len(q), len(kv)), bool)
    if rule.causal or rule.chunk_size:
        dense &= kv <= q[:, None]
    if rule.chunk_size:
        dense &= kv // rule.chunk_size == q[:, None] // rule.chunk_size
    for side, apart in zip(rule.sliding_window or (None, None), (q[:, None] - kv, kv - q[:, None]), strict=True):
        dense &= True if side is None else apart <= side
    if rule.masks:
        dense = dense & np.any([np.asarray(m.visible(rows, columns)) for m in rule.masks], axis=0)
    reader, owner, row = np.nonzero(dense.reshape(ranks, q_length, ranks, kv_length).any(1))
    return {(int(offset), int(row)) for offset, row in zip((reader - owner) % ranks, row, strict=True)}


@pytest.mark.parametrize("name", RULES)
def test_in_the_contiguous_layout_no_other_hop_is_made(name: str):
    for ranks, q_length, kv_length in itertools.product((2, 3, 4, 8), (2, 4), (2, 4, 6)):
        made = set(rows_seen(RULES[name], Shards("contiguous", ranks), (q_length, kv_length)))
        assert made == {offset for offset, _ in seen(RULES[name], "contiguous", ranks, q_length, kv_length)} | {0}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RULES)
def test_every_row_that_some_query_sees_travels(name: str, layout: str):
    for ranks, q_length, kv_length in itertools.product((2, 3, 4, 8), (2, 4, 16), (2, 6, 12)):
        rows = rows_seen(RULES[name], Shards(layout, ranks), (q_length, kv_length))
        for offset, row in seen(RULES[name], layout, ranks, q_length, kv_length):
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
    (level,) = levels(Rule(1.0, sliding_window=window), Shards(layout, 8), (16, 16), ("sp",), (8,))
    assert dict(zip(level.distances[1:], level.rows[1:], strict=True)) == rows
    assert [(hop.key_shift, hop.next_rows) for hop in level.forward_hops[:-1]] == [*rows.items()]
    assert [hop.gradient_shift for hop in level.backward_hops] == [None, *(-distance for distance in rows)]


def test_a_ring_of_two_sends_only_the_rows_that_its_window_sees():
    (level,) = levels(Rule(1.0, sliding_window=(5, 0)), Shards("contiguous", 2), (16, 16), ("sp",), (2,))
    assert level.rows == ((0, 16), (11, 16))
    (level,) = levels(Rule(1.0, causal=True), Shards("contiguous", 2), (16, 16), ("sp",), (2,))
    assert level.rows is None


def test_long_shards_send_whole_tiles():
    (level,) = levels(Rule(1.0, sliding_window=(1000, 0)), Shards("contiguous", 4), (32768, 32768), ("sp",), (4,))
    assert level.rows == ((0, 32768), (32768 - 1024, 32768)) and MOST_TILES == 64


def test_positions_of_the_callers_own_and_unbounded_masks_rule_out_nothing():
    x = jnp.ones((1, 32, 1, 4))
    window = validated(x, x, x, sliding_window=(1, 0), q_positions=np.arange(32), ranks=1).rule_of_hops
    anything = Rule(1.0, masks=(masks.Predicate(lambda i, j: i == j),), mask_of_head=(0,))
    shards = Shards("contiguous", 4)
    assert rows_seen(window, shards, (8, 8)) == rows_seen(anything, shards, (8, 8)) == dict.fromkeys(range(4), (0, 8))


def test_one_query_a_rank_cannot_be_cut_and_need_not_be_where_nothing_is_left_out():
    assert rows_seen(Rule(1.0), Shards("zigzag", 4), (1, 8)) == dict.fromkeys(range(4), (0, 8))


def test_a_ring_has_one_level_with_axes_of_one_rank_or_hops_to_leave_out():
    def made(rule: Rule, axis: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Level, ...]:
        return levels(rule, Shards("contiguous", int(np.prod(sizes))), (4, 4), axis, sizes)

    whole, window, own = Rule(1.0), Rule(1.0, sliding_window=(4, 0)), Rule(1.0, chunk_size=4)
    assert [level.ranks for level in made(whole, ("a", "b"), (2, 4))] == [4, 2]
    assert [(level.axis, level.ranks) for level in made(window, ("a", "b"), (2, 4))] == [(("a", "b"), 8)]
    assert made(whole, ("a", "b"), (1, 8)) == (Level(("b",), 8, tuple(range(8))),)
    assert made(whole, ("a",), (1,)) == made(own, ("a",), (8,)) == ()


def test_more_hops_than_are_unrolled_are_passed_on_also_where_others_are_left_out():
    (level,) = levels(Rule(1.0, sliding_window=(40, 0)), Shards("contiguous", 16), (4, 4), ("sp",), (16,))
    assert level.distances == tuple(range(11)) and level.rows is None
