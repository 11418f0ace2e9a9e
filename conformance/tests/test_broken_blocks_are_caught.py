# SPDX-License-Identifier: Apache-2.0
"""The suite's calls catch kernels that are wrong only for some sizes, or for some options together."""

import functools
from collections.abc import Iterable

import numpy as np
import pytest
from breaks import Break
from broken_masks import GIVEN, IDS, POSITIONS, WINDOWS
from broken_numbers import DROPOUT, RESULTS, SCORES
from broken_sizes import SIZES
from broken_tiles import TILES
from numpy_ring import Dense, OneAfterAnother, run
from ringattn_conformance import tiers, comparison
from ringattn_conformance.cases import Case
from ringattn_conformance.lattice import mixtures, points
from ringattn_conformance.ranks import Placement
from ringattn_core import Feature

BREAKS: dict[str, Break] = WINDOWS | POSITIONS | IDS | GIVEN | SCORES | DROPOUT | RESULTS | SIZES | TILES
MOST_BEYOND_CORE = 5
"""The most known faults that the core tier may leave to the full tier."""


@functools.cache
def calls(tier: str) -> list[tuple[Case, Placement]]:
    """The calls of a tier that compare every result with the oracle: mixtures, then named cases, small ones first.

    The full tier is listed without the core tier.
    """
    every = (mixtures(frozenset(Feature)), points())
    mixed, named = ([(one.case, one.placement) for one in some if one.tier == tier] for some in every)
    return [*sorted(mixed, key=size), *sorted(named, key=size)]


def size(call: tuple[Case, Placement]) -> int:
    return call[0].batch * call[0].heads * call[0].q_length


def catches(call: tuple[Case, Placement], kernel: Dense) -> bool:
    """Whether a result of this kernel is beyond its tolerance."""
    case, placement = call
    with np.errstate(all="ignore"):
        got = run(case, placement, kernel)
    try:
        comparison.check(got, case.answer, case)
    except AssertionError:
        return True
    return False


def caught(kernel: Dense, among: Iterable[tuple[Case, Placement]]) -> bool:
    return any(catches(call, kernel) for call in among)


@pytest.mark.parametrize("name", BREAKS)
def test_a_kernel_that_is_wrong_for_some_calls_is_caught(name: str):
    broken = BREAKS[name]
    assert caught(broken.kernel, calls(tiers.CORE)) is broken.core, f"core: {broken.fault}"
    assert broken.core or caught(broken.kernel, calls(tiers.FULL)), f"full: {broken.fault}"


@pytest.mark.parametrize("name", [name for name, broken in BREAKS.items() if broken.rarer])
def test_a_kernel_that_has_a_fault_in_rare_calls_is_caught(name: str):
    every = sorted((*calls(tiers.CORE), *calls(tiers.FULL)), key=lambda call: call[1].ring)
    for number, (dtype, kernel) in enumerate(BREAKS[name].rarer):
        among = [call for call in every if call[0].dtype == dtype]
        assert caught(kernel, among), f"full: {BREAKS[name].fault} (only in {dtype}, kernel {number})"


def test_few_faults_are_left_to_the_full_tier():
    assert sum(not broken.core for broken in BREAKS.values()) <= MOST_BEYOND_CORE


def beyond_half(kernel: Dense, among: Iterable[tuple[Case, Placement]], patch: pytest.MonkeyPatch) -> list[str]:
    """The calls in which a result of this kernel is off by more than half of its tolerance."""
    patch.setattr(comparison, "factor", 0.5)
    return [f"{case} on {placement}" for case, placement in among if catches((case, placement), kernel)]


def test_the_kernel_that_they_break_is_right_and_has_half_of_every_tolerance_left(monkeypatch: pytest.MonkeyPatch):
    assert beyond_half(Dense(), calls(tiers.CORE), monkeypatch) == []


def test_large_scores_in_float32_leave_half_of_every_tolerance_to_a_kernel_that_rounds_often(
    monkeypatch: pytest.MonkeyPatch,
):
    both = [*calls(tiers.CORE), *calls(tiers.FULL)]
    large = [call for call in both if call[0].nonzero is not None and call[0].dtype == "float32"]
    assert {case.head_dim for case, _ in large} == {64, 21, 128, 80, 192, 96, 256}
    assert beyond_half(OneAfterAnother(), large, monkeypatch) == []
