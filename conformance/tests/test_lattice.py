# SPDX-License-Identifier: Apache-2.0
"""The named cases: each in one place of the full tier, and together on every ring and in every layout."""

import pytest
from ringattn_conformance import tiers
from ringattn_conformance.cases import CASES, NAMED
from ringattn_conformance.lattice import LAYOUTS, RINGS, Point, one_place, points


def of(tier: str, largest: int = RINGS[-1]) -> list[Point]:
    return [point for point in points(largest) if tiers.contains(tier, point.tier)]


def test_every_case_is_in_one_place_of_the_full_tier():
    assert [point.case.name for point in of(tiers.FULL)] == [case.name for case in CASES]


def test_the_places_are_every_ring_of_several_ranks_in_every_layout():
    met = {(point.placement.ring, point.placement.layout) for point in of(tiers.FULL)}
    assert met == {(ring, layout) for ring in RINGS if ring > 1 for layout in LAYOUTS}
    assert {point.placement.check_vma for point in of(tiers.FULL)} == {True, False}


def test_a_case_is_on_the_ring_that_it_needs():
    needed = {case.name: (case.ring, one_place(case)[0]) for case in CASES if case.ring}
    assert needed and not {name: both for name, both in needed.items() if both[0] != both[1]}


def test_the_core_tier_has_the_cases_that_are_marked():
    assert {point.case for point in of(tiers.CORE)} == {case for case in CASES if case.core}


@pytest.mark.parametrize("largest", [1, 2, 3, 4])
def test_rings_may_be_bounded(largest: int):
    assert {point.placement.ring for point in of(tiers.FULL, largest)} <= {ring for ring in RINGS if ring <= largest}
    assert {one_place(case, largest)[0] <= largest for case in CASES} == {True}


def test_the_exhaustive_tier_holds_every_point_once():
    every = [str(point) for point in points()]
    assert len(every) == len(set(every))
    assert every == [str(point) for point in of(tiers.EXHAUSTIVE)]


def test_a_bound_on_the_rings_changes_no_name():
    assert [str(point) for point in points(2)] == [str(point) for point in points()]


def test_the_cases_are_named_once():
    assert len(NAMED) == len({*NAMED}) and len({case.name for case in CASES}) == len(CASES)
