# SPDX-License-Identifier: Apache-2.0
"""A call on global arrays through `mesh=` gives the numbers of one device, in every layout and for uneven lengths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from ringattn_core import from_layout, ring_attention, to_layout
from ringattn_core.contract.features import Feature

from ringattn_conformance import devices, oracle, tiers, tolerances
from ringattn_conformance.cases import ELSEWHERE, KEYWORDS, OPERANDS, Case
from ringattn_conformance.lattice import LAYOUTS
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import Placement, static_options

UNEVEN = tuple(case for case in ELSEWHERE if case.name.startswith("uneven"))


def _agrees(case: Case, backend: str, layout: str, *more: Feature) -> None:
    """The call on global arrays, reordered by core's own functions, and every gradient, against the oracle."""
    ring = max(ring for ring in (1, 2, 4) if ring <= len(jax.devices()))
    mesh = Mesh(np.array(devices.own_first()[:ring]), ("sp",))
    inputs = case.inputs(ring)
    problem = inputs.problem
    operands = {name: jnp.asarray(x) for name in OPERANDS if (x := getattr(problem, name)) is not None}
    moved = {"q": 1, "k": 1, "v": 1}

    def call(operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        x = {n: to_layout(a, layout, ring, moved[n]) if n in moved else a for n, a in operands.items()}
        named = {KEYWORDS[name]: array for name, array in (x | inputs.fixed).items()}
        options: dict[str, Any] = {**named, **static_options(case)}
        found = ring_attention(**options, mesh=mesh, axis_name="sp", layout=layout, backend=backend)
        out, *lse = found if isinstance(found, tuple) else (found,)
        return from_layout(out, layout, ring), *(from_layout(x, layout, ring, 2) for x in lse)

    cotangents = tuple(jnp.asarray(x) for x in (inputs.dout, inputs.dlse) if x is not None)
    with owed(backend, case.needs | Placement(layout=layout).needs | {Feature.GRADIENTS, *more}) as right:
        outputs, pull = jax.vjp(call, operands)
        gradients = {OPERANDS[name]: x for name, x in pull(cotangents)[0].items()}
        if right:
            answer = oracle.attend(problem, inputs.dout, inputs.dlse)
            got = dict(zip(("out", "lse"), outputs, strict=False)) | gradients
            tolerances.check(got, answer, case, inputs, f"by mesh, {layout}")


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
