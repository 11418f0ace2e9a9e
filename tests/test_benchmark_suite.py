# SPDX-License-Identifier: Apache-2.0
"""Whether the benchmark suite measures beside rivals that fail, and counts the pairs that a mask shows."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import suite

    return suite


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of a smoke run, which has a rival that aborts, one that raises, and one that is not installed."""
    path = tmp_path_factory.mktemp("bench") / "run.json"
    command = [sys.executable, str(BENCHMARKS / "suite.py"), "--suite", "cpu", "--smoke", "--rounds", "2"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| forward+backward | ours, ring of 2 |" in done.stdout
    return path


def test_rivals_that_fail_are_rows_that_say_so_and_the_others_are_measured(smoke: Path, suite: Any):
    rows = suite.read(smoke)["rows"]
    problems = {row.who: row.problem for row in rows if row.problem}
    assert problems == {
        "aborts": "it ended the process with SIGABRT",
        "raises": "ValueError: this rival always raises",
        "absent": "not installed (no module no_such_module)",
    }
    measured = {(row.workload, row.who, row.ring) for row in rows if len(row.seconds) == 2}
    on_a_ring = {("ring of 64 tokens", *one) for one in (("ours", 1), ("ours", 2), ("all-gather", 2))}
    assert measured == on_a_ring | {("decode", who, 1) for who in ("ours", "jax.nn", "flax")}
    assert all(min(row.floor.values()) > 0 and row.error < 5e-2 for row in rows if row.seconds)


def test_every_script_can_be_imported():
    scripts = [path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert len(scripts) >= 6
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(scripts)}"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_pairs_are_those_that_the_mask_shows(suite: Any):
    import numpy as np
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
