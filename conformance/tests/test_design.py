# SPDX-License-Identifier: Apache-2.0
"""The covering design: every two levels of two factors meet, and a kernel that branches on a size is caught."""

import functools
from collections.abc import Iterable

import numpy as np
import pytest
from ringattn_conformance import tiers
from ringattn_conformance.cases import ENTRIES
from ringattn_conformance.factors import BY_CLASS, OPTIONS, SIZES, Level, length_class, levels_of
from ringattn_conformance.lattice import Point, drawn, points
from ringattn_core import Feature
from ringattn_testing.conformance.broken_branches import BRANCHES, IGNORED, ignoring
from ringattn_testing.conformance.catching import catches, size
from ringattn_testing.conformance.draw_design import OPTION_OF, pairs, wanted
from ringattn_testing.conformance.effects import matters
from ringattn_testing.conformance.numpy_ring import Dense

EVERY: int = 3
"""Of the pairs of an option and a class of a size, the test breaks each so many-th."""


@functools.cache
def design(tier: str) -> tuple[Point, ...]:
    """The calls of the design in a tier, small ones first."""
    every = drawn(ENTRIES["design"], frozenset(Feature))
    held = [point for point in every if tiers.contains(tier, point.tier)]
    return tuple(sorted(held, key=lambda point: size((point.case, point.placement))))


@pytest.mark.parametrize("tier", [tiers.CORE, tiers.FULL])
def test_every_two_levels_meet_in_a_call_in_which_both_matter(tier: str):
    """In core every option meets every class of a size; in full every level meets every level of another factor."""
    missing = wanted(tier)
    for point in design(tier):
        # Whether an option matters takes the oracle seconds in all, so it is asked of the options of new pairs alone.
        new = missing.intersection(pairs(point.case, point.placement, tier))
        options = {OPTION_OF.get(name, name) for pair in new for name, _ in pair} & OPTIONS.keys()
        without = frozenset(option for option in options if not matters(point.case, option))
        missing.difference_update(pairs(point.case, point.placement, tier, without))
    assert sorted(map(sorted, missing)) == []


def test_every_length_has_a_class_and_no_class_is_empty():
    lengths = {length_class(length) for length in range(1, 4000)}
    assert lengths == set(SIZES["kv_length"]) == set(SIZES["q_length"]) | {"above 2048"}
    for factor in ("q_length", "kv_length", "lengths"):
        for level, values in SIZES[factor].items():
            assert {length_class(length) for length in values} == {level}


def caught(kernel: Dense, among: Iterable[Point]) -> bool:
    return any(catches((one.case, one.placement), kernel) for one in among)


@functools.cache
def others() -> dict[str, list[Point]]:
    """The calls of each tier that are in no design: named ones, and values of options."""
    every = [*points(), *drawn(ENTRIES["values"], frozenset(Feature))]
    return {tier: [one for one in every if tiers.contains(tier, one.tier)] for tier in (tiers.CORE, tiers.FULL)}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_kernel_that_branches_on_an_ordinary_size_is_caught(name: str):
    broken = BRANCHES[name]
    tier = tiers.CORE if broken.core else tiers.FULL
    assert caught(broken.kernel, [*design(tier), *others()[tier]])


def broken_pairs() -> list[tuple[str, Level]]:
    """Each pair of an option and a class of a size that can meet, in a fixed order."""
    classes = [(factor, level) for factor in (*BY_CLASS, "dtype") for level in SIZES[factor]]
    possible = wanted(tiers.CORE)
    return [(option, one) for option in IGNORED for one in classes if frozenset({(option, ""), one}) in possible]


def with_pair(option: str, one: Level, tier: str) -> list[Point]:
    return [
        point
        for point in design(tier)
        if one in (levels := levels_of(point.case, point.placement)) and any(name == option for name, _ in levels)
    ]


def survivors(some: Iterable[tuple[str, Level]], tier: str) -> list[tuple[str, Level]]:
    """The pairs whose broken kernels pass every call of the design in a tier. Other calls cannot save them."""
    with np.errstate(all="ignore"):
        return [
            (option, one) for option, one in some if not caught(ignoring(option, one), with_pair(option, one, tier))
        ]


def test_a_kernel_that_ignores_an_option_for_a_class_of_a_size_is_caught():
    every = broken_pairs()
    some = every[::EVERY]
    assert len(every) > 800 and len(some) > 280
    alive = survivors(some, tiers.CORE)
    assert len(alive) <= 0.1 * len(some), f"the core tier passes {alive}"
    alive = survivors(alive, tiers.FULL)
    assert len(alive) <= 0.02 * len(some), f"the full tier passes {alive}"
