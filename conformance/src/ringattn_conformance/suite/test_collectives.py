# SPDX-License-Identifier: Apache-2.0
"""The permutes in the compiled program are those of core's plan, in number, in bytes and in direction."""

import re
from collections import Counter

import jax
import pytest
from ringattn_core.backends import discovery
from ringattn_core.contract.features import Feature
from ringattn_core.ring import hops
from ringattn_core.ring.parcels import joint

from ringattn_conformance import tiers
from ringattn_conformance.blocks import call_of
from ringattn_conformance.cases import DTYPES, Case
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import Placed, Placement, on_devices, place, with_gradients

SIZES = {"f32": 4, "bf16": 2, "f16": 2, "u16": 2, "s32": 4, "u32": 4, "u8": 1, "pred": 1}
PERMUTE = re.compile(r"= ([^=]*?) collective-permute(-start)?\(.*source_target_pairs=\{\{(\d+),(\d+)\}")
SHAPE = re.compile(r"(\w+)\[([\d,]+)\]")
CASES = (
    (Case("all-hops"), Placement(4)),
    (Case("all-hops-causal", causal=True), Placement(4, "zigzag")),
    (Case("unequal-values", value_dim=5), Placement(4, "striped")),
    (Case("narrow", dtype="bfloat16"), Placement(4)),
    (Case("one-hop-by-window", window=(5, 0)), Placement(4)),
    (Case("both-ways", causal=True, heads=4), Placement(4, "zigzag", two_way=True)),
    (Case("both-ways-narrow", dtype="bfloat16"), Placement(4, two_way=True)),
    (Case("alone", causal=True), Placement(1)),
)


def _sent(placed: Placed) -> Counter[tuple[int, int]]:
    """How many permutes, by bytes and by distance, one rank makes in the forward and the backward pass."""
    program = jax.jit(with_gradients(placed.everywhere()))
    text = program.lower(placed.operands, placed.fixed, placed.cotangents).compile().as_text() or ""
    return Counter(
        (size, (int(target) - int(origin)) % placed.placement.ring)
        for result, start, origin, target in PERMUTE.findall(text)
        for size in _carried(result, bool(start))
    )


def _carried(result: str, start: bool) -> list[int]:
    """The bytes of each array that an instruction with this result type sends.

    The result of the start of an asynchronous instruction lists every array twice: as its input and as its output.
    """
    sizes = [_bytes(dtype, dims) for dtype, dims in SHAPE.findall(result)]
    return sizes[: len(sizes) // 2] if start else sizes


def _bytes(dtype: str, dims: str) -> int:
    size = SIZES[dtype]
    for dim in dims.split(","):
        size *= int(dim or 1)
    return size


def _planned(placed: Placed) -> Counter[tuple[int, int]]:
    """The permutes that the engine plans for the same call."""
    (rows, columns), ring = placed.case.lengths(placed.placement.ring), placed.placement.ring
    call, together = call_of(placed.case, placed.inputs), joint(discovery.get(placed.backend).implementation())
    plan = hops.plan(
        call.rule, placed.placement.layout, ring, rows // ring, columns // ring, placed.placement.two_way, together
    )
    problem, itemsize = placed.inputs.problem, DTYPES[placed.case.dtype](0).itemsize
    elements = (problem.k.size + problem.v.size) // ring
    return Counter((send.bytes(elements, itemsize), send.shift % ring) for send in (*plan.forward, *plan.backward))


@tiers.mark(tiers.CORE, "all-hops-causal", "one-hop-by-window", "both-ways", "alone")
@pytest.mark.parametrize(("case", "placement"), CASES, ids=[case.name for case, _ in CASES])
def test_the_compiled_program_sends_what_the_plan_says(ringattn_backend: str, case: Case, placement: Placement):
    """Forward and backward in one program. A backend with a ring function of its own plans for itself."""
    if discovery.get(ringattn_backend).descriptor().kernel is None or not on_devices(placement):
        return
    placed = place(case, placement, ringattn_backend)
    with owed(ringattn_backend, case.needs | placement.needs | {Feature.GRADIENTS}) as right:
        sent = _sent(placed)
        if right:
            assert sent == _planned(placed)
            assert bool(sent) == (placement.ring > 1)
            if placement.two_way:
                onward, back = (sum(size * n for (size, shift), n in sent.items() if shift == s) for s in (1, 3))
                assert onward == back, "the two directions carry different numbers of bytes"
