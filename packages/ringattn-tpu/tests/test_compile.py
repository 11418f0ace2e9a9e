# SPDX-License-Identifier: Apache-2.0
"""For every supported chip the programs compile, hide all sends, and cost no more than is written down."""

from typing import Any

import pytest
from ringattn_testing.tpu.budgets import PEAK, VMEM, over
from ringattn_testing.tpu.programs import CHIPS
from ringattn_testing.tpu.reports import Permute, Report, compiled

pytest.importorskip("libtpu", reason="libtpu compiles for TPUs: pip install libtpu")

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "forward": ("programs:ring", {"length": 4096, "heads": 4}),
    "gradients": ("programs:ring", {"length": 4096, "heads": 4, "backward": True}),
    "one pass": ("programs:block", {"length": 4096, "heads": 2}),
    "two passes": ("programs:block", {"length": 16384, "heads": 1}),
}
# They take the compiler longer than all others: the first is compiled for the oldest and the newest chip, each other
# one for one of them.
WITH_EVERYTHING: dict[str, tuple[str, dict[str, Any]]] = {
    "everything": ("programs:everything", {"length": 120}),
    "everything in float32": ("programs:everything", {"length": 120, "dtype": "float32", "broadcast": True}),
    "from sinks": ("programs:from_sinks", {"length": 2048, "heads": 1}),
    "all but dropout, in longer tiles": ("programs:everything", {"length": 2000, "dropout": 0.0}),
}
OF_CHIP = {
    "v5e": ("everything", "from sinks", "all but dropout, in longer tiles"),
    "7x": ("everything", "everything in float32"),
}
RINGS = ("forward", "gradients")
SERIAL: dict[str, tuple[str, dict[str, Any]]] = {"serial": ("programs:serial", {"length": 2048, "heads": 4})}
HOPS = {"v5e": 4, "v5p": 4, "v6e": 4, "7x": 8}


@pytest.fixture(params=CHIPS)
def chip(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def reports(chip: str, once: Any) -> dict[str, Report]:
    """What is compiled for a chip is compiled once, for all that is asked of it."""
    programs = PROGRAMS | {name: WITH_EVERYTHING[name] for name in OF_CHIP.get(chip, ())}
    made = once(f"programs-{chip}", lambda: {name: x.as_dict() for name, x in compiled(CHIPS[chip], programs).items()})
    return {name: Report.from_dict(one) for name, one in made.items()}


def test_a_ring_sends_once_less_than_it_hops(chip: str, reports: dict[str, Any]):
    """Keys travel on every hop but the last; in the backward pass their gradients follow, and go home at the end."""
    sends, hops = {name: len(reports[name].permutes) for name in RINGS}, HOPS[chip]
    assert sends == {"forward": hops - 1, "gradients": 3 * (hops - 1)}
    assert reports["forward"].kernels == {"ringattn_forward": hops}
    assert reports["gradients"].kernels == {"ringattn_forward": hops, "ringattn_backward_fused": hops}


@pytest.mark.parametrize("ring", RINGS)
def test_sends_are_under_way_while_a_kernel_runs(ring: str, chip: str, reports: dict[str, Any]):
    synchronous = [permute.name for permute in reports[ring].permutes if permute.synchronous]
    assert not synchronous, f"nothing runs during {synchronous}"
    exposed = reports[ring].exposed
    assert not exposed, f"no kernel runs during {exposed} of {reports[ring].permutes}"


@pytest.mark.parametrize("program", ["one pass", "two passes"])
def test_kernels_take_no_more_vector_memory_than_written_down(program: str, chip: str, reports: dict[str, Any]):
    for kernel, size in reports[program].vmem.items():
        bound = VMEM[kernel][chip]
        assert not (complaint := over(f"{kernel} on {chip}: MiB of vector memory", size / 2**20, bound)), complaint


@pytest.mark.parametrize("ring", RINGS)
def test_a_ring_takes_no_more_memory_than_written_down(ring: str, chip: str, reports: dict[str, Any]):
    peak = reports[ring].peak / 2**20
    assert not (complaint := over(f"the ring's {ring} on {chip}: MiB at its peak", peak, PEAK[ring][chip])), complaint


def test_a_send_that_a_kernel_waits_for_is_seen():
    report = compiled(CHIPS["v6e"], SERIAL)["serial"]
    assert report.kernels == {"ringattn_forward": 1} and len(report.permutes) == 1
    assert report.exposed == [report.permutes[0].name]


def test_a_synchronous_send_is_exposed():
    report = Report((Permute("a", True), Permute("b", False, ("k",))), {}, {}, 0)
    assert report.exposed == ["a"]
    assert Report.from_dict(report.as_dict()) == report
