# SPDX-License-Identifier: Apache-2.0
"""Promises of `benchmarks/projection.py`: it extrapolates exactly, and is near the rings that were measured."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from ringattn_core.strategies import choose
from ringattn_core.strategies.devices import DEVICES

ROOT = Path(__file__).parent.parent
H200 = DEVICES["h200"]
GQA = (32, 8, 128)


@pytest.fixture(scope="module")
def projection() -> Any:
    spec = importlib.util.spec_from_file_location("projection", ROOT / "benchmarks/projection.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("plan", "inner"), [("ring", 1), ("all_gather", 1), ("ulysses", 8)])
def test_what_is_extrapolated_is_what_the_model_says(projection: Any, plan: str, inner: int) -> None:
    device = H200 if inner > 1 else H200.linked_by(H200.far)
    plans = choose.reckoned(projection.work(64, 2048, GQA), device, inner)
    (exact,) = [x for x in plans if x.strategy == plan]
    seconds, memory = projection.extrapolated(plan, device, 64, 2048, GQA, inner)
    assert seconds == pytest.approx(exact.seconds, rel=1e-9)
    assert memory == exact.memory


def test_sends_hide_from_the_length_on_that_it_prints(projection: Any) -> None:
    far = H200.linked_by(H200.far)
    for passes in ("forward", "backward"):
        least = projection.hiding(far, GQA, 1, passes)
        for length, hides in ((least, True), (least - 256, False)):
            ring = choose.reckoned(projection.work(8, length, GQA), far)[0]
            steps = [step for step in getattr(ring, passes) if step.name.startswith("hop") and step.sent]
            assert all(step.hides for step in steps) == hides
    faster = dataclasses.replace(H200.far, bandwidth=2 * H200.far.bandwidth)
    assert projection.hiding(H200.linked_by(faster), GQA, 1, "forward") < projection.hiding(far, GQA, 1, "forward")


def test_a_plan_that_does_not_fit_has_no_rate(projection: Any) -> None:
    far = H200.linked_by(H200.far)
    assert projection.kept("all_gather", far, 16384, 32768, GQA, 1) is None
    assert 0.5 < projection.kept("ring", far, 16384, 32768, GQA, 1) <= 1


WITHIN = {
    ("h200", 2, "ring"): 0.05, ("h200", 4, "ring"): 0.1, ("h100", 2, "ring"): 0.06, ("h100", 2, "ulysses"): 0.06,
    ("h100", 2, "all_gather"): 0.12,
}  # fmt: skip
"""How near the model is, by the kind of GPU, their number and the strategy."""


def test_the_model_is_near_what_the_page_has_measured(projection: Any) -> None:
    seen = set()
    for run in projection.runs((ROOT / "docs/benchmarks.md").read_text()):
        for name, measured, model in projection.compared(run):
            case = name.split()[1].strip(","), run.ranks, name.split()[-1]
            seen.add(case)
            assert abs(model / measured - 1) <= WITHIN[case], (name, measured, model)
    assert seen == set(WITHIN)


def test_the_fixed_time_and_the_rate_of_a_gpu_alone_are_found(projection: Any) -> None:
    def run(call: float, lengths: tuple[int, ...]) -> Any:
        counts = {t: projection.operations((t // 2) ** 2 / 2, "forward") for t in lengths}
        rates = {(t, "forward", "alone"): n / (call + n / 500e12) / 1e12 for t, n in counts.items()}
        return projection.Run("NVIDIA H200", 2, rates)

    assert run(2e-4, (4096, 8192, 65536)).fitted("forward") == pytest.approx((2e-4, 500e12))
    assert run(-1e-5, (4096, 8192)).fitted("forward")[0] == 0
    assert run(0.0, (4096,)).fitted("forward") == pytest.approx((0, 500e12))
