# SPDX-License-Identifier: Apache-2.0
"""Whether every benchmark can be imported, compares what is comparable, and counts the pairs that a mask shows."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def test_every_script_can_be_imported():
    scripts = [path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert len(scripts) >= 6
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(scripts)}"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_counters_are_those_of_the_longest_kernel_of_each_pass_in_the_second_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import kernel_counters

    names = {"ringattn_hopper_forward": 30, "device_kernel<FlashAttnBwdPreprocess>": 5, "device_kernel<Bwd>": 70}
    cold = [(name, 10 * time) for name, time in names.items()]
    printed = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Value"']
    for number, (name, time) in enumerate([*cold, *names.items()]):
        printed += [f'"{number}","{name}","{metric}","{time},000"' for metric in (kernel_counters.NANOSECONDS, "other")]
    found = kernel_counters.of_passes(printed)
    assert {part: counters["other"] for part, counters in found.items()} == {"forward": 3e4, "backward": 7e4}
    with pytest.raises(SystemExit, match="no kernel"):
        kernel_counters.of_passes(printed[:1])


@pytest.mark.parametrize("wrong", [1.0, np.nan])
def test_rivals_that_compute_something_else_are_not_timed(
    wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import call_rivals
    from measuring import Prepared
    from rivals import Rival

    results = {who: [np.ones(3), np.ones(2)] for who in (call_rivals.OURS, call_rivals.UNORDERED, "right")}
    results["wrong"] = [np.ones(3), np.asarray([1.0, 1.0 + wrong])]
    rivals = {who: Rival(lambda *_, who=who: who) for who in results}
    monkeypatch.setattr(call_rivals, "RIVALS", {"gpu": rivals})
    monkeypatch.setattr(
        call_rivals, "prepare", lambda rival, *_: Prepared(lambda: None, lambda: results[rival.make()], None)
    )
    found = call_rivals.compiled("causal", ["wrong", "right"])
    assert {part: [*runs] for part, runs in found.items()} == {
        "forward": [call_rivals.OURS, "right"],
        "forward+backward": [call_rivals.OURS, call_rivals.UNORDERED, "right"],
    }
    assert f"wrong differs by {np.inf if np.isnan(wrong) else wrong / 2**0.5:.1e}" in capsys.readouterr().err


def test_pairs_are_those_that_the_mask_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from workloads import Shape, Workload

    shape = Shape(1, 24, 1, 1, 8)
    documents = {"documents": (9, 1, 14)}
    windows = {"causal": False, "window": (3, 0)}, {"window": (3, 2)} | documents
    for options in ({"causal": False}, {}, documents, *windows):
        workload = Workload(shape, **options)
        ahead = np.arange(24)[:, None] - np.arange(24)[None]
        visible = (ahead >= 0) | (not workload.causal)
        if workload.documents:
            ids = np.repeat(np.arange(3), workload.documents)
            visible &= ids[:, None] == ids[None]
        if workload.window:
            visible &= (ahead <= workload.window[0]) & (ahead >= -workload.window[1])
        assert workload.pairs == visible.sum(), options
