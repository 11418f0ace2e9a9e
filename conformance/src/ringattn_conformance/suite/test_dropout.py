# SPDX-License-Identifier: Apache-2.0
"""Dropout: the bits are those of the specification, on every ring, layout and mesh."""

import dataclasses

import numpy as np
import pytest

from ringattn_conformance import oracle, tiers
from ringattn_conformance.cases import Case
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import Placed, Placement, on_devices, place, run

CASE = Case("dropout-bits", batch=2, heads=4, kv_heads=2, value_dim=48, dropout=0.4, lse=False)
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
    """Equal scores, and a value for each key that says which one it is."""
    placed = place(case, placement, backend)
    problem = placed.inputs.problem
    v = np.broadcast_to(np.eye(48, dtype=problem.v.dtype)[None, :, None], problem.v.shape)
    problem = dataclasses.replace(problem, q=np.zeros_like(problem.q), v=v, seed=seed)
    return dataclasses.replace(placed, inputs=dataclasses.replace(placed.inputs, problem=problem))


def _kept(placed: Placed) -> np.ndarray:
    return np.swapaxes(run(placed, gradients=False)["out"], 1, 2) > 0


@tiers.mark(tiers.CORE, "ring2-zigzag", "ring8-contiguous")
@pytest.mark.parametrize("number", range(len(PLACEMENTS)), ids=lambda number: str(PLACEMENTS[number]))
def test_the_bits_are_those_of_the_specification(ringattn_backend: str, number: int):
    placement = PLACEMENTS[number]
    if not on_devices(placement):
        placement = dataclasses.replace(placement, data=1, heads=1, emulated=True)
    placed = _probe(ringattn_backend, placement, seed=12345)
    with owed(ringattn_backend, CASE.needs | placement.needs) as right:
        kept = _kept(placed)
        if right:
            wrong = int((kept != oracle.kept(placed.inputs.problem)).sum())
            assert not wrong, f"{wrong} of {kept.size} bits differ on {placement}"


@tiers.mark(tiers.CORE, "4-striped")
@pytest.mark.parametrize(("ring", "layout"), [(1, "contiguous"), (4, "striped")])
def test_they_are_the_same_in_half_precision(ringattn_backend: str, ring: int, layout: str):
    """Kernels of narrow numbers are others, and may draw by other instructions."""
    case = dataclasses.replace(CASE, name="dropout-bits-bfloat16", dtype="bfloat16")
    placed = _probe(ringattn_backend, Placement(ring, layout), 12345, case)
    with owed(ringattn_backend, case.needs | placed.placement.needs) as right:
        kept = _kept(placed)
        if right:
            wrong = int((kept != oracle.kept(placed.inputs.problem)).sum())
            assert not wrong, f"{wrong} of {kept.size} bits differ"


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1])
def test_every_seed_of_32_bits_has_its_own_bits(ringattn_backend: str, seed: int):
    placed = _probe(ringattn_backend, Placement(2), seed)
    with owed(ringattn_backend, CASE.needs) as right:
        kept = _kept(placed)
        if right:
            assert np.array_equal(kept, oracle.kept(placed.inputs.problem))
