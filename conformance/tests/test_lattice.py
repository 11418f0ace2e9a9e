# SPDX-License-Identifier: Apache-2.0
"""The calls of `cases.json`: where they run, what they have together, and that each option matters."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from ringattn_conformance import case_inputs, tiers
from ringattn_conformance.cases import CASES, ENTRIES, NAMED
from ringattn_conformance.lattice import LAYOUTS, Point, calls, drawn, points, untried
from ringattn_conformance.tiers import RINGS
from ringattn_core import Backend, Feature
from ringattn_core.backends.discovery import registered

ALL = frozenset(Feature)
DTYPES = {Feature.FLOAT32, Feature.FLOAT16, Feature.BFLOAT16}
MIXED = drawn(ENTRIES["design"], ALL)


def within(tier: str, among: Iterable[Point]) -> list[Point]:
    return [point for point in among if tiers.contains(tier, point.tier)]


def needs(point: Point) -> frozenset[Feature]:
    return point.case.needs | point.placement.needs


def test_every_case_is_in_one_place_of_the_full_tier_on_every_ring_in_every_layout():
    full = within(tiers.FULL, points())
    assert [point.case.name for point in full] == [case.name for case in CASES]
    met = {(point.placement.ring, point.placement.layout) for point in full}
    assert met == {(ring, layout) for ring in RINGS for layout in LAYOUTS if ring > 1 or layout == LAYOUTS[0]}
    assert {point.placement.check_vma for point in full} == {True, False}


def test_every_call_is_named_once_and_fits_its_ring():
    assert len({str(point) for point in points()}) == len(points()) > 5 * len(CASES)
    assert len(NAMED) == len(ENTRIES["named"]) + len(ENTRIES["elsewhere"])
    assert len({str(one) for one in MIXED}) == len(MIXED) == len(ENTRIES["design"])
    assert {one.placement.ring for one in MIXED} == {*RINGS}
    assert all(one.case.fits(one.placement.ring, one.placement.layout) for one in (*points(), *MIXED))


def test_every_two_features_meet():
    met = {frozenset(pair) for one in MIXED for pair in itertools.combinations(needs(one), 2)}
    missing = {frozenset(pair) for pair in itertools.combinations(ALL - {Feature.GRADIENTS}, 2)} - met
    halves = {frozenset({Feature.PRECISION, dtype}) for dtype in (Feature.FLOAT16, Feature.BFLOAT16)}
    apart = {frozenset(pair) for pair in itertools.combinations(DTYPES, 2)}
    assert missing == halves | apart | {frozenset({Feature.ZIGZAG, Feature.STRIPED})}


@pytest.mark.parametrize(
    "features",
    [
        {Feature.GRADIENTS, Feature.FLOAT32, Feature.CAUSAL},
        ALL - {Feature.RETURN_LSE, Feature.FLOAT32, Feature.PRECISION},
    ],
    ids=["three features", "without lse and float32"],
)
def test_a_backend_gets_mixtures_of_what_it_declares_under_the_same_names(features: set[Feature]):
    found = drawn(ENTRIES["design"], features)
    assert frozenset().union(*map(needs, found)) == {*features} - {Feature.GRADIENTS}
    assert {str(one) for one in found} <= {str(one) for one in MIXED}
    met = {frozenset(pair) for one in found for pair in itertools.combinations(needs(one), 2)}
    every = {frozenset(pair) for one in MIXED for pair in itertools.combinations(needs(one), 2)}
    assert met >= {pair for pair in every if pair <= features - DTYPES}


def test_a_declared_feature_that_no_passed_call_has_is_told():
    features = frozenset(
        (Feature.FLOAT32, Feature.FLOAT16, Feature.CAUSAL, Feature.SINKS, Feature.PRECISION, Feature.GRADIENTS)
    )
    core = [point for point in calls(features, 7) if point.tier == tiers.CORE]
    every, without_sinks = {x.name for x in core}, {x.name for x in core if not x.case.sinks}
    found = {}
    for largest in (None, 1):
        with registered(Backend("some", 1, ("cpu",), features, kernel="nowhere:KERNEL", largest_head=largest)):
            found[largest] = untried("some", 7, every)
            lacking, nothing = untried("some", 7, without_sinks), untried("some", 7, ())
    assert found[None] == [], "precision is owed in float32 alone"
    assert "SINKS in float16" in found[1]
    assert {"SINKS in float16", "SINKS in float32"} <= {*lacking} and "FLOAT16 in float16" in nothing


def test_every_token_of_scattered_positions_has_its_own():
    """With one position for many keys, the gradient of ALiBi slopes could be zero, and rounding alone would show."""
    for length in range(1, 500):
        assert len(np.unique(case_inputs.scattered(1, length, length)[0])) == length
