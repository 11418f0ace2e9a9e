# SPDX-License-Identifier: Apache-2.0
"""Dropout keeps the entries that the specification says, on every ring, layout and mesh."""

import dataclasses

import numpy as np
import pytest

from ringattn_conformance import oracle, tiers
from ringattn_conformance.cases import Case
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import Placed, Placement, on_devices, place, run

CASE = Case("dropout-bits", batch=2, heads=4, kv_heads=4, head_dim=48, value_dim=48, dropout=0.4)
SEEDS = (12345, 0, 2**31, 2**32 - 1)
PLACEMENTS = (
    Placement(1),
    Placement(2, "zigzag"),
    Placement(4, "striped"),
    Placement(8),
    Placement(3, "contiguous", emulated=True),
    Placement(4, data=2),
    Placement(4, "zigzag", two_way=True),
    Placement(2, "striped", data=2, heads=2),
)


def _probe(backend: str, placement: Placement, seed: int, case: Case = CASE) -> Placed:
    """Scores are equal and the value of each key is a unit vector, so an output shows which keys are kept."""
    placed = place(case, placement, backend)
    problem = placed.inputs.problem
    v = np.broadcast_to(np.eye(48, dtype=problem.v.dtype)[None, :, None], problem.v.shape)
    return placed.changed(q=np.zeros_like(problem.q), v=v, seed=seed)


def _kept(placed: Placed) -> np.ndarray:
    return np.swapaxes(run(placed, gradients=False)["out"], 1, 2) > 0


@tiers.mark(tiers.CORE, "ring2-zigzag", "ring8-contiguous")
@pytest.mark.parametrize("number", range(len(PLACEMENTS)), ids=lambda number: str(PLACEMENTS[number]))
def test_the_bits_are_those_of_the_specification(ringattn_backend: str, number: int):
    placement = PLACEMENTS[number]
    if not on_devices(placement):
        placement = dataclasses.replace(placement, data=1, heads=1, emulated=True)
    placed = _probe(ringattn_backend, placement, SEEDS[number % len(SEEDS)])
    with owed(ringattn_backend, CASE.needs | placement.needs) as right:
        kept = _kept(placed)
        if right:
            wrong = int((kept != oracle.kept(placed.inputs.problem)).sum())
            assert not wrong, f"{wrong} of {kept.size} bits differ on {placement}"


@tiers.mark(tiers.CORE, "4-striped")
@pytest.mark.parametrize(("ring", "layout"), [(1, "contiguous"), (4, "striped")])
def test_they_are_the_same_in_half_precision(ringattn_backend: str, ring: int, layout: str):
    """Kernels for 16 bits are different programs, and may draw in another way."""
    case = dataclasses.replace(CASE, name="dropout-bits-bfloat16", dtype="bfloat16")
    placed = _probe(ringattn_backend, Placement(ring, layout), SEEDS[0], case)
    with owed(ringattn_backend, case.needs | placed.placement.needs) as right:
        kept = _kept(placed)
        if right:
            wrong = int((kept != oracle.kept(placed.inputs.problem)).sum())
            assert not wrong, f"{wrong} of {kept.size} bits differ"
