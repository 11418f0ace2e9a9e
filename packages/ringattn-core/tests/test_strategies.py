# SPDX-License-Identifier: Apache-2.0
"""Every strategy computes the oracle's output and gradients: with every option, on every ring, layout and mesh."""

import dataclasses
import functools
from typing import Any

import jax
import pytest
from jax.sharding import Mesh, PartitionSpec
from ringattn_conformance import case_inputs, tolerances
from ringattn_conformance.cases import OPERANDS, Case
from ringattn_conformance.ranks import DATA, HEADS, RING, Placed, Placement, answer_of, place, with_gradients

OUTER, INNER = "outer", "inner"
# Together the cases use every option that a strategy moves between ranks.
MASKS = Case(
    "masks", batch=1, heads=8, kv_heads=2, kv_length=96, value_dim=12, window=(30, 9), dense_mask="BNT",
    segments=case_inputs.scattered_padding, builder=case_inputs.OF_HEADS, lse=True,
)  # fmt: skip
SCORES = Case(
    "scores", heads=8, kv_heads=4, causal=True, positions=case_inputs.far_rows, bias="BNT", slopes=True, sinks="each",
    dropout=0.2, soft_cap=2.0,
)  # fmt: skip
BROADCAST = Case(
    "broadcast", heads=8, causal=True, segments=case_inputs.large_ids, bias="T", dense_mask="NT", sinks="head",
    dtype="bfloat16",
)  # fmt: skip
OF_HEADS = Case("of-heads", heads=6, kv_heads=3, bias="N", dense_mask="T", dropout=0.1, causal=True, lse=True)


def on_axes(placed: Placed, outer: int, **options: Any) -> Any:
    """The function of global arrays on a mesh with two axes for the sequence. The mesh has the inner one first."""
    devices, both = placed.placement.mesh.devices, (OUTER, INNER)
    mesh = Mesh(devices.reshape(1, -1, outer, 1), (DATA, INNER, OUTER, HEADS))

    def over_both(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(both if entry == RING else entry for entry in spec))

    local = functools.partial(placed.local, axis_name=both, **options)
    trees = placed.operands, placed.fixed
    specs = tuple({name: over_both(placed.spec(name, x.shape)) for name, x in tree.items()} for tree in trees)
    shapes = zip(placed.outputs, placed.output_shapes(), strict=True)
    out_specs = tuple(over_both(placed.spec(name, shape)) for name, shape in shapes)
    check_vma = placed.placement.check_vma
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)


def agrees(case: Case, placement: Placement, strategy: str, outer: int | None = None) -> None:
    """Checks the output, the lse and every gradient of one compiled call."""
    placed = place(case, placement, "xla")
    if outer is None:
        everywhere = placed.everywhere(functools.partial(placed.local, strategy=strategy))
    else:
        everywhere = on_axes(placed, outer, strategy=strategy)
    outputs, found = jax.jit(with_gradients(everywhere))(placed.operands, placed.fixed, placed.cotangents)
    gradients = {OPERANDS[name]: x for name, x in found.items()}
    got = placed.natural(dict(zip(placed.outputs, outputs, strict=True)) | gradients)
    where = f"by {strategy} on {placed.placement}"
    tolerances.check(got, answer_of(case, placement.ring), case, placed.inputs, where)


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        (SCORES, Placement(1)),
        (SCORES, Placement(2, "zigzag")),
        (OF_HEADS, Placement(3, "striped", check_vma=False)),
        (MASKS, Placement(4, "zigzag", check_vma=False)),
        (MASKS, Placement(4, "striped", emulated=True)),
        (BROADCAST, Placement(4)),
        (SCORES, Placement(8, "striped", check_vma=False)),
        (dataclasses.replace(SCORES, batch=2), Placement(2, "striped", data=2, heads=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["all_gather", "ulysses"])
def test_the_output_and_all_gradients_are_those_of_the_oracle(case: Case, placement: Placement, strategy: str):
    agrees(case, placement, strategy)


@pytest.mark.parametrize(
    ("case", "placement", "strategy"),
    [
        (MASKS, Placement(4, "striped"), "ulysses"),
        (BROADCAST, Placement(8, "zigzag", check_vma=False), "ulysses"),
        (SCORES, Placement(8, "striped", check_vma=False), "ulysses"),
        (SCORES, Placement(4, "zigzag"), "all_gather"),
    ],
    ids=str,
)
def test_over_two_axes_ulysses_goes_over_the_inner_and_the_ring_over_the_outer(
    case: Case, placement: Placement, strategy: str
):
    agrees(case, placement, strategy, outer=2)
