# SPDX-License-Identifier: Apache-2.0
"""The core tier catches kernels that are wrong only for some sizes, or for some options together."""

import functools

import pytest
from broken_blocks import BREAKS, Break
from reference_kernels import Dense
from ringattn_conformance import tolerances
from ringattn_conformance.cases import Case
from ringattn_conformance.lattice import points
from ringattn_conformance.mixtures import mixtures
from ringattn_conformance.ranks import Placement, answer_of, place, run
from ringattn_conformance.tiers import CORE
from ringattn_core import Backend, Feature, Support
from ringattn_core.backends.discovery import registered

FULL = dict.fromkeys(Feature, Support.FULL)


@functools.cache
def core() -> list[tuple[Case, Placement]]:
    """The calls that the core tier compares with the oracle, those on small rings first."""
    named = [(point.case, point.placement) for point, tier in points() if tier == CORE]
    found = [*named, *((one.case, one.placement) for one in mixtures(frozenset(Feature)))]
    return sorted(found, key=lambda call: call[1].ring)


def calls_of(broken: Break) -> list[tuple[Case, Placement]]:
    """The six calls on the smallest rings that the fault touches."""
    return [call for call in core() if broken.touches(call[0])][:6]


def caught(kernel: Dense, case: Case, placement: Placement) -> bool:
    """Whether the numbers of the call are beyond their tolerance."""
    with registered(Backend("broken", 1, ("cpu",), FULL, kernel="broken:KERNEL"), kernel):
        placed = place(case, placement, "broken")
        got = run(placed)
    try:
        tolerances.check(got, answer_of(case, placement.ring), case, placed.inputs)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", BREAKS)
def test_the_core_tier_catches_it(name: str):
    calls = calls_of(BREAKS[name])
    assert calls, "no call of the core tier has what it breaks"
    assert any(caught(BREAKS[name].kernel, *call) for call in calls), f"{BREAKS[name].fault} It passes {calls}"


def test_the_kernel_that_they_break_is_right():
    """On the first call that each fault touches."""
    calls = list(dict.fromkeys(calls_of(broken)[0] for broken in BREAKS.values()))
    wrong = [f"{case} on {placement}" for case, placement in calls if caught(Dense(), case, placement)]
    assert len(calls) > 5 and not wrong, wrong
