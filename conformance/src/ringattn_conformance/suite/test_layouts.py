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

from ringattn_conformance import oracle, tiers, tolerances
from ringattn_conformance.cases import OPERANDS, Case
from ringattn_conformance.ingredients import packed
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import static_options

LAYOUTS = {"contiguous": set(), "zigzag": {Feature.ZIGZAG}, "striped": {Feature.STRIPED}}
UNEVEN = (
    Case("uneven-causal", q_length=13, kv_length=13, causal=True, sinks="head", bias="NT", lse=False),
    Case("uneven-cross", q_length=7, kv_length=18, window=(4, 2), bias="", heads=4, kv_heads=2),
    Case("uneven-segments", q_length=14, kv_length=14, segments=packed, dense_mask="BT", dropout=0.2, lse=False),
    Case("uneven-shorter-than-ring", q_length=3, kv_length=2, slopes=True),
)


def _mesh(ring: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:ring]), ("sp",))


def _ring() -> int:
    return max(ring for ring in (1, 2, 4) if ring <= len(jax.devices()))


def _whole(case: Case, backend: str, ring: int, layout: str) -> tuple[dict[str, Any], Any]:
    """The call on whole arrays, by `mesh`, with every gradient; reordered by core's own functions."""
    inputs = case.inputs(ring)
    problem = inputs.problem
    operands = {name: jnp.asarray(x) for name in OPERANDS if (x := getattr(problem, name)) is not None}
    fixed = {"q_segment_ids": problem.q_segments, "kv_segment_ids": problem.kv_segments}
    fixed |= {"attention_mask": inputs.dense_mask, "dropout_seed": problem.seed if problem.dropout else None}
    moved = {"q": 1, "k": 1, "v": 1}

    def call(operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        x = {n: to_layout(a, layout, ring, moved[n]) if n in moved else a for n, a in operands.items()}
        found = ring_attention(
            x["q"], x["k"], x["v"], x.get("sinks"), x.get("bias"), alibi_slopes=x.get("slopes"), mesh=_mesh(ring),
            axis_name="sp", layout=layout, backend=backend, **fixed, **static_options(case),
        )  # fmt: skip
        out, *lse = found if isinstance(found, tuple) else (found,)
        return from_layout(out, layout, ring), *(from_layout(x, layout, ring, 2) for x in lse)

    cotangents = tuple(jnp.asarray(x) for x in (inputs.dout, inputs.dlse) if x is not None)
    outputs, pull = jax.vjp(call, operands)
    gradients = {OPERANDS[name]: x for name, x in pull(cotangents)[0].items()}
    return dict(zip(("out", "lse"), outputs, strict=False)) | gradients, inputs


@tiers.core
@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_arrays_through_a_mesh_in_every_layout(ringattn_backend: str, layout: str):
    case = Case("by-mesh", causal=True, window=(20, None), sinks="head", heads=4, kv_heads=2)
    with owed(ringattn_backend, case.needs | LAYOUTS[layout] | {Feature.GRADIENTS}) as right:
        got, inputs = _whole(case, ringattn_backend, _ring(), layout)
        if right:
            answer = oracle.attend(inputs.problem, inputs.dout, inputs.dlse)
            tolerances.check(got, answer, case, inputs, f"by mesh, {layout}")


@tiers.mark(tiers.CORE, "uneven-causal")
@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_lengths_that_the_ring_does_not_divide(ringattn_backend: str, case: Case):
    # Padding is a segment of its own, so that core may ask for segment ids that the caller did not give.
    with owed(ringattn_backend, case.needs | {Feature.GRADIENTS, Feature.SEGMENT_IDS}) as right:
        got, inputs = _whole(case, ringattn_backend, _ring(), "contiguous")
        if right:
            answer = oracle.attend(inputs.problem, inputs.dout, inputs.dlse)
            tolerances.check(got, answer, case, inputs, "by mesh")
