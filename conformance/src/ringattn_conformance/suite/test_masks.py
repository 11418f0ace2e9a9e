# SPDX-License-Identifier: Apache-2.0
"""A query sees exactly the keys that the masks of the specification allow."""

import dataclasses

import numpy as np
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import oracle, tiers
from ringattn_conformance.cases import ALONE, Case
from ringattn_conformance.lattice import LAYOUTS
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import Placed, Placement, place, run

MASKS = frozenset({
    Feature.CAUSAL, Feature.SLIDING_WINDOW, Feature.CHUNKED, Feature.SEGMENT_IDS, Feature.POSITIONS,
    Feature.MASK_BUILDER, Feature.ATTENTION_MASK,
})  # fmt: skip
OTHERS = frozenset({Feature.FLOAT32, Feature.CROSS_LENGTHS, Feature.RETURN_LSE})
MASKED = [case for case in ALONE if case.needs & MASKS and not case.needs - MASKS - OTHERS]


def _probe(case: Case, placement: Placement, backend: str) -> Placed:
    """Scores are equal and the value of each key is a unit vector, so a query's output shows which keys it sees."""
    case = dataclasses.replace(case, lse=False, head_dim=case.kv_length, value_dim=case.kv_length)
    placed = place(case, placement, backend)
    zeros = {name: np.zeros_like(getattr(placed.inputs.problem, name)) for name in ("q", "k")}
    shape = (case.batch, case.kv_length, case.kv_heads, case.kv_length)
    names = np.broadcast_to(np.eye(case.kv_length, dtype=np.float32)[None, :, None, :], shape)
    return placed.changed(v=names, **zeros)


@tiers.mark(tiers.CORE, *(case.name for case in MASKED if case.core))
@pytest.mark.parametrize("number", range(len(MASKED)), ids=lambda number: MASKED[number].name)
def test_the_keys_that_a_query_sees(ringattn_backend: str, number: int):
    case = MASKED[number]
    placement = Placement(2, LAYOUTS[number % 3], emulated=number % 2 == 0)
    placed = _probe(case, placement, ringattn_backend)
    with owed(ringattn_backend, placed.case.needs | placement.needs) as right:
        out = run(placed, gradients=False)["out"]
        if right:
            seen = np.swapaxes(out, 1, 2) > 0
            wanted = oracle.visible(placed.inputs.problem)
            wrong = np.argwhere(seen != wanted)
            assert not wrong.size, (
                f"case {case.name!r} on {placed.placement}: {len(wrong)} pairs wrong, the first at batch, head, query, "
                f"key {wrong[0].tolist()}: seen {bool(seen[tuple(wrong[0])])}, want {bool(wanted[tuple(wrong[0])])}"
            )
