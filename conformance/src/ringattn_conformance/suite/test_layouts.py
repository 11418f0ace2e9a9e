# SPDX-License-Identifier: Apache-2.0
"""A call on global arrays through `mesh=` gives the numbers of one device, in every layout and for uneven lengths."""

import functools

import jax
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import tiers
from ringattn_conformance.cases import ELSEWHERE, Case
from ringattn_conformance.lattice import LAYOUTS
from ringattn_conformance.outcomes import agrees
from ringattn_conformance.ranks import Local, Placed, Placement, inputs_of

UNEVEN = tuple(case for case in ELSEWHERE if case.name.startswith("uneven"))


class ByMesh(Placed):
    """The call takes global arrays, and splits them itself."""

    def everywhere(self, local: Local | None = None) -> Local:
        return functools.partial(self.local, mesh=self.placement.mesh)


def _agrees(case: Case, backend: str, layout: str, *more: Feature) -> None:
    """The call on global arrays in the order of the layout, and every gradient, against the oracle."""
    ring = max(ring for ring in (1, 2, 4) if ring <= len(jax.devices()))
    agrees(ByMesh(case, Placement(ring, layout), backend, inputs_of(case, ring)), needs=more)


@tiers.core
@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_arrays_through_a_mesh_in_every_layout(ringattn_backend: str, layout: str):
    case = Case("by-mesh", causal=True, window=(20, None), sinks="head", heads=4, kv_heads=2)
    _agrees(case, ringattn_backend, layout)


@tiers.mark(tiers.CORE, "uneven-causal", "uneven-segments")
@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_lengths_that_the_ring_does_not_divide(ringattn_backend: str, case: Case):
    # Padding is a segment of its own, so core may need segment ids that the caller did not give.
    _agrees(case, ringattn_backend, "contiguous", Feature.SEGMENT_IDS)
