# SPDX-License-Identifier: Apache-2.0
"""The plan leaves out hops that no query can use, and its sends bring every key and take every gradient home."""

import itertools

import numpy as np
import pytest
from ringattn_core import masks
from ringattn_core.contract.rule import Rule
from ringattn_core.contract.visibility import position_masks
from ringattn_core.masks import Coordinates
from ringattn_core.placement.layout import LAYOUTS, order
from ringattn_core.ring.hops import Plan, plan

RULES = {
    "full": Rule(1.0),
    "causal": Rule(1.0, causal=True),
    "window": Rule(1.0, sliding_window=(5, 5)),
    "causal window": Rule(1.0, causal=True, sliding_window=(5, 5)),
    "left of one shard": Rule(1.0, causal=True, sliding_window=(4, 0)),
    "future only": Rule(1.0, sliding_window=(None, 3)),
    "chunk": Rule(1.0, chunk_size=8),
    "small chunk": Rule(1.0, chunk_size=3),
    "prefix": Rule(1.0, masks=(masks.Prefix(6),), mask_of_head=(0,)),
    "causal or prefix": Rule(1.0, masks=(masks.Causal() | masks.Prefix(2), masks.Local(1, 0)), mask_of_head=(0, 1)),
}


def seen(rule: Rule, layout: str, ranks: int, q_length: int, kv_length: int) -> set[int]:
    """The offsets at which some pair is visible, by the dense mask."""
    q, kv = (order(layout, ranks, ranks * n) for n in (q_length, kv_length))
    everyone = [*position_masks(rule)] or [masks.Full()]
    rows, columns = Coordinates(q, q).rows(), Coordinates(kv, kv).columns()
    dense = np.ones((len(q), len(kv)), bool)
    for mask in everyone:
        dense = dense & np.asarray(mask.visible(rows, columns))
    if rule.masks:
        dense = dense & np.any([np.asarray(m.visible(rows, columns)) for m in rule.masks], axis=0)
    meets = dense.reshape(ranks, q_length, ranks, kv_length).any((1, 3))
    return {(r - c) % ranks for r, c in itertools.product(range(ranks), repeat=2) if meets[r, c]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RULES)
def test_every_hop_that_some_query_can_use_is_made(name: str, layout: str):
    for ranks, q_length, kv_length in itertools.product((2, 3, 4, 8), (2, 4), (2, 4, 6)):
        made = set(plan(RULES[name], layout, ranks, q_length, kv_length).offsets)
        assert seen(RULES[name], layout, ranks, q_length, kv_length) <= made


@pytest.mark.parametrize("name", RULES)
def test_in_the_contiguous_layout_no_other_hop_is_made(name: str):
    for ranks, q_length, kv_length in itertools.product((2, 3, 4, 8), (2, 4), (2, 4, 6)):
        made = set(plan(RULES[name], "contiguous", ranks, q_length, kv_length).offsets)
        assert made == seen(RULES[name], "contiguous", ranks, q_length, kv_length) | {0}


def test_positions_of_the_callers_own_and_unbounded_masks_rule_out_nothing():
    window = Rule(1.0, sliding_window=(1, 0), increasing=False)
    anything = Rule(1.0, masks=(masks.Predicate(lambda i, j: i == j),), mask_of_head=(0,))
    assert plan(window, "contiguous", 4, 8, 8).offsets == plan(anything, "contiguous", 4, 8, 8).offsets == (0, 1, 2, 3)


def test_planning_a_long_ring_needs_nothing_of_the_size_of_its_square():
    import tracemalloc

    tracemalloc.start()
    offsets = plan(Rule(1.0, causal=True, sliding_window=(4096, 0)), "contiguous", 128, 8192, 8192).offsets
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert offsets == (0, 1)
    assert peak < 128 * 8192 * 64


@pytest.mark.parametrize(
    "ranks, offsets",
    [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (8, (0, 1, 2)), (8, (0, 1, 7)), (8, (0, 7)), (8, tuple(range(8)))],
)
def test_backward_brings_every_key_and_takes_every_gradient_home(ranks: int, offsets: tuple[int, ...]):
    made = Plan(ranks, offsets)
    keys = sum(send.shift for send in made.backward if send.keys)
    gradients = sum(send.shift for send in made.backward if send.gradients)
    assert keys == offsets[-1]
    assert gradients == (0 if len(offsets) == 1 else ranks - offsets[1])
    assert sum(send.shift for send in made.forward) == offsets[-1]
    assert len(made.forward) == len(offsets) - 1


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_each_of_two_directions_sends_half(ranks: int):
    one, two = (plan(Rule(1.0, causal=True), "zigzag", ranks, 4, 4, two_way) for two_way in (False, True))
    assert (one.signs, two.signs) == ((1,), (1, -1))
    for whole, halves in ((one.forward, two.forward), (one.backward, two.backward)):
        assert [send.shift for send in halves[::2]] == [-send.shift for send in halves[1::2]]
        assert [(s.shift, s.keys, s.gradients) for s in halves[::2]] == [(s.shift, s.keys, s.gradients) for s in whole]
        assert {2 * half.bytes(12, 2) - send.bytes(12, 2) for half, send in zip(halves[::2], whole, strict=True)} == {0}


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [(Rule(1.0), 1), (Rule(1.0), 2), (Rule(1.0, sliding_window=(3, 3)), 8), (Rule(1.0, chunk_size=4), 8)],
)
def test_two_way_has_no_effect_with_hops_left_out_or_on_two_ranks(rule: Rule, ranks: int):
    assert plan(rule, "contiguous", ranks, 4, 4, two_way=True) == plan(rule, "contiguous", ranks, 4, 4)


def test_a_parcel_holds_keys_in_their_dtype_and_gradients_in_float32():
    full = Plan(4, (0, 1, 2, 3)).backward
    assert [(send.keys, send.gradients) for send in full] == [
        (True, False),
        (True, False),
        (True, True),
        (False, True),
        (False, True),
    ]
    assert [send.bytes(10, 2) for send in full] == [20, 20, 60, 40, 40]
