# SPDX-License-Identifier: Apache-2.0
"""The suite's calls catch kernels that are wrong only for some sizes, or for some options together."""

import functools
from collections.abc import Iterable

import pytest
from ringattn_conformance import tiers
from ringattn_conformance.cases import ENTRIES, Case
from ringattn_conformance.lattice import drawn, points
from ringattn_conformance.ranks import Placement
from ringattn_core import Feature
from ringattn_testing.conformance.breaks import Break
from ringattn_testing.conformance.broken_masks import CHOSEN, GIVEN, IDS, POSITIONS, RANGES, WINDOWS
from ringattn_testing.conformance.broken_numbers import DROPOUT, RESULTS, SCORES
from ringattn_testing.conformance.broken_sizes import SIZES
from ringattn_testing.conformance.broken_tiles import TILES
from ringattn_testing.conformance.catching import catches, refused, size
from ringattn_testing.conformance.numpy_ring import Dense

BREAKS: dict[str, Break] = (
    WINDOWS | POSITIONS | IDS | RANGES | CHOSEN | GIVEN | SCORES | DROPOUT | RESULTS | SIZES | TILES
)


@functools.cache
def calls(tier: str) -> list[tuple[Case, Placement]]:
    """The calls of a tier that compare every result with the oracle, small ones first.

    The full tier is listed without the core tier.
    """
    every = (*drawn(ENTRIES["design"], frozenset(Feature)), *points())
    return sorted([(one.case, one.placement) for one in every if one.tier == tier], key=size)


def caught(kernel: Dense, among: Iterable[tuple[Case, Placement]]) -> bool:
    return any(catches(call, kernel) for call in among)


@pytest.mark.parametrize("name", BREAKS)
def test_a_kernel_that_is_wrong_for_some_calls_is_caught(name: str):
    broken = BREAKS[name]
    assert caught(broken.kernel, calls(tiers.CORE)) is broken.core, "the core tier"
    assert broken.core or caught(broken.kernel, calls(tiers.FULL)), "the full tier"


@pytest.mark.parametrize("name", [name for name, broken in BREAKS.items() if broken.rarer])
def test_a_kernel_that_has_a_fault_in_rare_calls_is_caught(name: str):
    every = sorted((*calls(tiers.CORE), *calls(tiers.FULL)), key=size)
    for number, (dtype, kernel) in enumerate(BREAKS[name].rarer):
        among = [call for call in every if call[0].dtype == dtype]
        assert caught(kernel, among), f"only in {dtype}, kernel {number}"


def test_a_right_kernel_that_rounds_often_is_not_refused(monkeypatch: pytest.MonkeyPatch):
    every = (*calls(tiers.CORE), *calls(tiers.FULL))
    assert [str(call[0]) for call in every if refused(call, monkeypatch)] == []
