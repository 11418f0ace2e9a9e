# SPDX-License-Identifier: Apache-2.0
"""The lattice: each tier inside the next, small, and still every option meets every ring size and every layout."""

import pytest
from ringattn_conformance import tiers
from ringattn_conformance.cases import CASES
from ringattn_conformance.lattice import ESSENTIAL, LAYOUTS, RINGS, Point, one_place, points
from ringattn_core.contract.features import Feature

ELSEWHERE = {
    Feature.GRADIENTS, Feature.ZIGZAG, Feature.STRIPED, Feature.TWO_WAY, Feature.PRECISION, Feature.FUSED_BACKWARD,
}  # fmt: skip
"""What is no matter of a case, or tried by tests of its own."""
OPTIONS = [feature for feature in Feature if feature not in ELSEWHERE]


def of(tier: str, largest: int = RINGS[-1]) -> list[Point]:
    return [point for point, own in points(largest) if tiers.contains(tier, own)]


@pytest.mark.parametrize("feature", OPTIONS, ids=lambda feature: feature.name)
def test_every_option_meets_every_ring_size_and_every_layout(feature: Feature):
    met = [point.placement for point in of(tiers.FULL) if feature in point.case.needs]
    assert {placement.ring for placement in met} == set(RINGS)
    assert {placement.layout for placement in met} == set(LAYOUTS)
    assert {placement.check_vma for placement in met} == {True, False}


@pytest.mark.parametrize("feature", [*OPTIONS, Feature.FUSED_BACKWARD], ids=lambda feature: feature.name)
def test_every_option_is_in_the_core_tier_on_a_ring_of_four_and_on_another(feature: Feature):
    met = {point.placement.ring for point in of(tiers.CORE) if feature in point.case.needs}
    assert 4 in met and len(met) > 1


def test_the_core_tier_has_every_ring_in_every_layout():
    met = {(point.placement.ring, point.placement.layout) for point in of(tiers.CORE)}
    assert {ring for ring, _ in met} == set(RINGS)
    assert {layout for _, layout in met} == set(LAYOUTS)


def test_the_essential_cases_exist():
    assert {case.name for case in CASES} >= ESSENTIAL


@pytest.mark.parametrize("largest", [1, 2, 3, 4])
def test_rings_may_be_bounded_and_every_option_still_meets_each_of_the_rest(largest: int):
    for feature in OPTIONS:
        met = [point.placement for point in of(tiers.FULL, largest) if feature in point.case.needs]
        assert {placement.ring for placement in met} == {ring for ring in RINGS if ring <= largest}
    assert {one_place(case, number, largest)[0] <= largest for number, case in enumerate(CASES)} == {True}


def test_every_case_runs_on_a_ring_of_four_and_on_another():
    rings: dict[str, set[int]] = {}
    for point in of(tiers.FULL):
        rings.setdefault(point.case.name, set()).add(point.placement.ring)
    assert rings.keys() == {case.name for case in CASES}
    assert all(4 in met and len(met) > 1 for met in rings.values())


def test_the_exhaustive_tier_holds_every_point_once():
    every = [str(point) for point, _ in points()]
    assert len(every) == len(set(every))
    assert every == [str(point) for point in of(tiers.EXHAUSTIVE)]
    assert len(of(tiers.CORE)) < len(of(tiers.FULL)) / 3 < len(every) / 9


def test_a_bound_on_the_rings_changes_no_name():
    assert [str(point) for point, _ in points(2)] == [str(point) for point, _ in points()]


def test_the_cases_are_named_once():
    assert len({case.name for case in CASES}) == len(CASES)
