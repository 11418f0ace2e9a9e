# SPDX-License-Identifier: Apache-2.0
"""The selection of points: small, and still every option meets every ring size and every layout."""

import pytest
from ringattn_conformance.cases import CASES
from ringattn_conformance.lattice import LAYOUTS, RINGS, one_place, points
from ringattn_core.features import Feature

ELSEWHERE = {
    Feature.GRADIENTS, Feature.ZIGZAG, Feature.STRIPED, Feature.TWO_WAY, Feature.PRECISION, Feature.FUSED_BACKWARD,
}  # fmt: skip
"""What is no matter of a case, or tried by tests of its own."""
OPTIONS = [feature for feature in Feature if feature not in ELSEWHERE]


@pytest.mark.parametrize("feature", OPTIONS, ids=lambda feature: feature.name)
def test_every_option_meets_every_ring_size_and_every_layout(feature: Feature):
    met = [point.placement for point in points(full=False) if feature in point.case.needs]
    assert {placement.ring for placement in met} == set(RINGS)
    assert {placement.layout for placement in met} == set(LAYOUTS)
    assert {placement.check_vma for placement in met} == {True, False}


@pytest.mark.parametrize("largest", [1, 2, 3, 4])
def test_rings_may_be_bounded_and_every_option_still_meets_each_of_the_rest(largest: int):
    for feature in OPTIONS:
        met = [point.placement for point in points(full=False, largest=largest) if feature in point.case.needs]
        assert {placement.ring for placement in met} == {ring for ring in RINGS if ring <= largest}
    assert {one_place(case, number, largest)[0] <= largest for number, case in enumerate(CASES)} == {True}


def test_every_case_runs_on_a_ring_of_four_and_on_another():
    rings: dict[str, set[int]] = {}
    for point in points(full=False):
        rings.setdefault(point.case.name, set()).add(point.placement.ring)
    assert rings.keys() == {case.name for case in CASES}
    assert all(4 in met and len(met) > 1 for met in rings.values())


def test_the_full_product_holds_every_point_once():
    full = [str(point) for point in points(full=True)]
    assert len(full) == len(set(full))
    assert {str(point) for point in points(full=False)} <= set(full)


def test_the_cases_are_named_once():
    assert len({case.name for case in CASES}) == len(CASES)
