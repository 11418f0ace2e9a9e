# SPDX-License-Identifier: Apache-2.0
"""The calls drawn from the domains catch kernels that are wrong for some values only, and pass right ones."""

import functools

import numpy as np
import pytest
from ringattn_conformance import domains, tiers
from ringattn_conformance.cases import ENTRIES
from ringattn_conformance.lattice import Point, drawn
from ringattn_core import Feature
from ringattn_testing.conformance.broken_values import VALUES
from ringattn_testing.conformance.catching import catches, refused, size
from ringattn_testing.conformance.draw_release import values

SEED = 20261126


@functools.cache
def calls(tier: str) -> list[Point]:
    """The calls of the release in a tier, small ones first."""
    every = drawn(ENTRIES["values"], frozenset(Feature))
    return sorted(
        (one for one in every if tiers.contains(tier, one.tier)), key=lambda one: size((one.case, one.placement))
    )


@pytest.mark.parametrize("name", VALUES)
def test_a_kernel_that_is_wrong_for_some_values_is_caught(name: str):
    broken = VALUES[name]

    def caught(tier: str) -> bool:
        among = [one for one in calls(tier) if broken.when(one.case)]
        return any(catches((one.case, one.placement), broken.kernel) for one in among)

    assert caught(tiers.CORE if broken.core else tiers.FULL)


def test_every_value_of_every_domain_is_in_the_release():
    computed = [entry for entry in ENTRIES["design"] if not entry["name"].startswith("kept-")]
    met = {pair for entry in (*ENTRIES["values"], *computed) for pair in values(entry)}
    met |= {(name, entry[name]) for entry in ENTRIES["named"] for name in domains.OPTIONS if name in entry}
    every = {(name, x) for table in (domains.SIZES, domains.OPTIONS) for name, some in table.items() for x in some}
    assert {pair for pair in every if pair[1] is not None} - met == set()


def test_a_right_kernel_that_rounds_often_is_not_refused(monkeypatch: pytest.MonkeyPatch):
    today = drawn(domains.today(SEED)[:12], frozenset(Feature))
    every = (*calls(tiers.FULL), *today)
    assert [str(one) for one in every if refused((one.case, one.placement), monkeypatch)] == []


def test_a_seed_always_draws_the_same_calls_and_another_seed_others():
    assert domains.today(SEED) == domains.today(SEED) != domains.today(SEED + 1)
    with np.errstate(all="raise"):
        assert len({entry["name"] for entry in domains.today(SEED)}) == len(domains.today(SEED))


def test_a_single_causal_query_of_a_drawn_call_is_not_at_the_position_of_the_first_key_by_default():
    every = [domains.draw(seed) for seed in range(1000)]
    causal = [one for one in every if one["q_length"] == 1 and one.get("causal")]
    assert max(one["kv_length"] for one in causal) > domains.MANY
    assert [one for one in causal if "positions" not in one] == []
