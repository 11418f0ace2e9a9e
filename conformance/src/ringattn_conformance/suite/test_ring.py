# SPDX-License-Identifier: Apache-2.0
"""Round the ring: the output, the lse and every gradient are the oracle's, for every option, ring size and layout."""

import dataclasses

import pytest
from ringattn_core.features import Feature

from ringattn_conformance import tiers, tolerances
from ringattn_conformance.cases import ALONE, NAMED, Case
from ringattn_conformance.lattice import Point, one_place
from ringattn_conformance.outcomes import owed, supports
from ringattn_conformance.ranks import Placement, answer_of, place, run


def _agrees(case: Case, placement: Placement, backend: str, gradients: bool) -> None:
    placed = place(case, placement, backend)
    with owed(backend, case.needs | placement.needs | ({Feature.GRADIENTS} if gradients else set())) as right:
        got = run(placed, gradients)
        if right:
            tolerances.check(got, answer_of(case, placement.ring), case, placed.inputs, f"on {placed.placement}")


def test_outputs_and_gradients_are_those_of_the_oracle(ringattn_backend: str, ringattn_point: Point):
    gradients = supports(ringattn_backend, Feature.GRADIENTS)
    _agrees(ringattn_point.case, ringattn_point.placement, ringattn_backend, gradients)


@tiers.mark(tiers.CORE, "plain", "segments-unseen-rank", "soft-cap")
@pytest.mark.parametrize("number", range(len(ALONE)), ids=lambda number: ALONE[number].name)
def test_without_gradients_the_output_is_the_same(ringattn_backend: str, number: int, ringattn_largest_ring: int):
    case = ALONE[number]
    placement = Placement(*one_place(case, number, ringattn_largest_ring), check_vma=number % 2 == 1)
    _agrees(case, placement, ringattn_backend, gradients=False)


@tiers.mark(tiers.CORE, "everything")
@pytest.mark.parametrize("name", ["everything", "causal-bfloat16", "sinks", "bias-forbids", "chunk"])
def test_one_device_may_play_all_ranks(ringattn_backend: str, name: str):
    placement = Placement(4, "zigzag", emulated=True)
    _agrees(NAMED[name], placement, ringattn_backend, supports(ringattn_backend, Feature.GRADIENTS))


def test_an_everything_ring_of_eight_holds_in_half_precision(ringattn_backend: str):
    case = dataclasses.replace(NAMED["everything-bfloat16"], name="everything-on-eight", q_length=96, kv_length=96)
    _agrees(case, Placement(8, "striped"), ringattn_backend, supports(ringattn_backend, Feature.GRADIENTS))
