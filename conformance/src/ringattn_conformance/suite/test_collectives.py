# SPDX-License-Identifier: Apache-2.0
"""What travels: the permutes in the compiled program are those of the plan, in number and in bytes."""

import dataclasses
import re
from collections import Counter
from typing import Any

import jax
import pytest
from ringattn_core.backends import discovery
from ringattn_core.contract.features import Feature
from ringattn_core.ring import hops
from ringattn_core.ring.parcels import joint

from ringattn_conformance import tiers
from ringattn_conformance.blocks import rule_of
from ringattn_conformance.cases import DTYPES, Case
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import Placed, Placement, on_devices, place, with_gradients

SIZES = {"f32": 4, "bf16": 2, "f16": 2, "u16": 2, "s32": 4, "u32": 4, "u8": 1, "pred": 1}
PERMUTE = re.compile(r"= ([^=]*?) collective-permute(-start)?\(.*source_target_pairs=\{\{(\d+),(\d+)\}")
SHAPE = re.compile(r"(\w+)\[([\d,]+)\]")
CASES = (
    (Case("all-hops", lse=False), "contiguous", 3),
    (Case("all-hops-causal", causal=True, lse=False), "zigzag", 3),
    (Case("unequal-values", value_dim=5, lse=False), "striped", 3),
    (Case("narrow", dtype="bfloat16", lse=False), "contiguous", 3),
    (Case("one-hop-by-window", window=(5, 0), lse=False), "contiguous", 1),
    (Case("two-hops-by-window", window=(5, 5), lse=False), "contiguous", 2),
    (Case("no-hop-by-chunk", chunk=12, lse=False), "contiguous", 0),
    (Case("one-hop-by-chunk", chunk=9, lse=False), "contiguous", 1),
    (Case("one-hop-of-many-queries", q_length=96, window=(20, 0), causal=True, lse=False), "contiguous", None),
)


def _sent(placed: Placed, gradients: bool) -> Counter[tuple[int, int]]:
    """How many permutes of how many bytes, how far onward, one rank makes."""
    everywhere = placed.everywhere()
    if gradients:
        lowered = jax.jit(with_gradients(everywhere)).lower(placed.operands, placed.fixed, placed.cotangents)
    else:
        lowered = jax.jit(everywhere).lower(placed.operands, placed.fixed)
    text = lowered.compile().as_text() or ""
    return Counter(
        (size, (int(target) - int(origin)) % placed.placement.ring)
        for result, start, origin, target in PERMUTE.findall(text)
        for size in _carried(result, bool(start))
    )


def _carried(result: str, start: bool) -> list[int]:
    """The bytes of each array that one instruction sends: XLA may send several, and a start names what it gives too."""
    sizes = [_bytes(dtype, dims) for dtype, dims in SHAPE.findall(result)]
    return sizes[: len(sizes) // 2] if start else sizes


def _bytes(dtype: str, dims: str) -> int:
    size = SIZES[dtype]
    for dim in dims.split(","):
        size *= int(dim or 1)
    return size


def _planned(placed: Placed) -> hops.Plan:
    rows, columns = placed.case.lengths(placed.placement.ring)
    rule, ring = rule_of(placed.case, rows, columns), placed.placement.ring
    together = joint(discovery.get(placed.backend).implementation())
    lengths = rows // ring, columns // ring
    return hops.plan(rule, placed.placement.layout, ring, *lengths, placed.placement.two_way, together)


def _bytes_of(sends: tuple[hops.Send, ...], placed: Placed) -> Counter[tuple[int, int]]:
    return Counter((send.bytes(*_elements(placed)), send.shift % placed.placement.ring) for send in sends)


def _elements(placed: Placed) -> tuple[int, int]:
    """How many elements a shard's packed K,V has, and of what size."""
    problem = placed.inputs.problem
    return (problem.k.size + problem.v.size) // placed.placement.ring, DTYPES[placed.case.dtype](0).itemsize


@tiers.mark(tiers.CORE, "all-hops-causal", "one-hop-by-window")
@pytest.mark.parametrize(("case", "layout", "expected"), CASES, ids=[case.name for case, *_ in CASES])
def test_the_compiled_program_sends_what_the_plan_says(
    ringattn_backend: str, case: Case, layout: str, expected: int | None
):
    """Forward and backward in one program. A backend with a ring function of its own plans for itself."""
    placement = Placement(4, layout)
    if discovery.get(ringattn_backend).descriptor().kernel is None or not on_devices(placement):
        return
    placed = place(case, placement, ringattn_backend)
    with owed(ringattn_backend, case.needs | placement.needs | {Feature.GRADIENTS}) as right:
        sent = _sent(placed, gradients=True)
        if right:
            plan = _planned(placed)
            assert sent == _bytes_of((*plan.forward, *plan.backward), placed)
            if expected is not None:
                assert len(plan.forward) == expected, "hops that no query can use are planned, or needed ones are not"


@pytest.mark.parametrize("number", [0, 4], ids=lambda number: CASES[number][0].name)
def test_without_gradients_only_keys_and_values_travel(ringattn_backend: str, number: int):
    case, layout, expected = CASES[number]
    placement = Placement(4, layout)
    if discovery.get(ringattn_backend).descriptor().kernel is None or not on_devices(placement):
        return
    placed = place(case, placement, ringattn_backend)
    with owed(ringattn_backend, case.needs) as right:
        sent = _sent(placed, gradients=False)
        if right:
            assert sent == _bytes_of(_planned(placed).forward, placed)
            assert sum(sent.values()) == expected


BOTH_WAYS = (
    (Case("both-ways", causal=True, lse=False, heads=4), "zigzag", True),
    (Case("both-ways-narrow", dtype="bfloat16", lse=False), "contiguous", True),
    (Case("both-ways-unequal-values", value_dim=5, lse=False), "striped", True),
    (Case("one-way-where-hops-are-left-out", window=(5, 0), lse=False), "contiguous", False),
)


@tiers.mark(tiers.CORE, "both-ways")
@pytest.mark.parametrize(("case", "layout", "both"), BOTH_WAYS, ids=[case.name for case, *_ in BOTH_WAYS])
def test_half_of_the_bytes_go_each_way(ringattn_backend: str, case: Case, layout: str, both: bool):
    placement = Placement(4, layout, two_way=True)
    if discovery.get(ringattn_backend).descriptor().kernel is None or not on_devices(placement):
        return
    placed = place(case, placement, ringattn_backend)
    with owed(ringattn_backend, case.needs | placement.needs | {Feature.GRADIENTS}) as right:
        sent = _sent(placed, gradients=True)
        if right:
            plan = _planned(placed)
            assert sent == _bytes_of((*plan.forward, *plan.backward), placed)
            halves = {shift: sum(size * n for (size, s), n in sent.items() if s == shift) for shift in (1, 3)}
            one_way = dataclasses.replace(plan, two_way=False)
            whole = sum(send.bytes(*_elements(placed)) for send in (*one_way.forward, *one_way.backward))
            assert (halves[1] == halves[3] == whole // 2) == both


@tiers.core
def test_a_ring_of_one_sends_nothing(ringattn_backend: str):
    case = Case("alone", causal=True, lse=False)
    placed = place(case, Placement(1), ringattn_backend)
    with owed(ringattn_backend, case.needs | {Feature.GRADIENTS}) as right:
        sent: Any = _sent(placed, gradients=True)
        if right:
            assert not sent
