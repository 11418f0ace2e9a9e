# SPDX-License-Identifier: Apache-2.0
"""The output, the lse and every gradient are the oracle's, for every option, ring size and layout."""

import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import tiers, tolerances
from ringattn_conformance.cases import ALONE, NAMED, Case
from ringattn_conformance.lattice import Point, one_place, places
from ringattn_conformance.outcomes import owed, supports
from ringattn_conformance.ranks import Placement, answer_of, place, run

TWO_WAY = (
    "gqa", "sinks-each", "dropout-gqa", "mask-of-heads", "alibi-causal", "bias-heads", "dense-mask-heads",
    "value-dim-larger", "everything", "causal-bfloat16",
)  # fmt: skip
"""Cases whose options belong to heads: in two directions each half of the heads goes its own way."""


def _agrees(case: Case, placement: Placement, backend: str, gradients: bool) -> None:
    placed = place(case, placement, backend)
    with owed(backend, case.needs | placement.needs | ({Feature.GRADIENTS} if gradients else set())) as right:
        got = run(placed, gradients)
        if right:
            tolerances.check(got, answer_of(case, placement.ring), case, placed.inputs, f"on {placed.placement}")


def test_outputs_and_gradients_are_those_of_the_oracle(ringattn_backend: str, ringattn_point: Point):
    gradients = supports(ringattn_backend, Feature.GRADIENTS)
    _agrees(ringattn_point.case, ringattn_point.placement, ringattn_backend, gradients)


@tiers.mark(tiers.CORE, "lse", "segments-unseen-rank", "soft-cap")
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


@tiers.mark(tiers.CORE, "gqa", "sinks-each")
@pytest.mark.parametrize("name", TWO_WAY)
def test_half_of_the_keys_may_go_round_the_other_way(ringattn_backend: str, name: str, ringattn_largest_ring: int):
    number, case = TWO_WAY.index(name), NAMED[name]
    possible = places(case, ringattn_largest_ring)
    # On two ranks both directions are one. Steps of four give consecutive cases other rings and layouts.
    possible = [place for place in possible if place[0] > 2] or possible
    ring, layout = possible[4 * number % len(possible)]
    placement = Placement(ring, layout, check_vma=number % 2 == 0, two_way=True)
    _agrees(case, placement, ringattn_backend, supports(ringattn_backend, Feature.GRADIENTS))


def test_keys_go_both_ways_where_the_mesh_splits_the_heads_too(ringattn_backend: str):
    case = Case(
        "two-ways-of-split-heads", heads=8, kv_heads=4, bias="NT", slopes=True, sinks="each", dropout=0.2,
        builder=NAMED["mask-of-heads"].builder,
    )  # fmt: skip
    placement = Placement(4, "striped", heads=2, two_way=True)
    _agrees(case, placement, ringattn_backend, supports(ringattn_backend, Feature.GRADIENTS))
