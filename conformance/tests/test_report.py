# SPDX-License-Identifier: Apache-2.0
"""The report: it keeps the worst error of each result, and says on what it was measured."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ringattn_conformance.report import Run

MODULE = """
import numpy as np
import pytest
from ringattn_conformance import tolerances

@pytest.mark.parametrize("error", [1e-6, 4e-6, 2e-6])
def test_it(ringattn_backend, error):
    tolerances._remember("float32", "out", error, 2e-5)

def test_that_fails(ringattn_backend):
    assert ringattn_backend == "other"

def test_of_somebody_else():
    pass
"""


def found(error: float, tolerance: float = 1.0) -> dict[str, dict[str, dict[str, float]]]:
    return {"float32": {"out": {"error": error, "tolerance": tolerance}}}


def test_of_all_errors_the_one_nearest_to_its_tolerance_stays():
    run = Run()
    for errors in (found(0.5, 10.0), found(0.2, 1.0), found(0.3, 10.0)):
        run.add("xla", "a", "passed", errors)
    assert run.worst == {"xla": found(0.2, 1.0)}
    assert run.outcomes == {"xla": {"passed": 3}}


def test_backends_are_told_apart_and_failures_are_named():
    run = Run()
    run.add("one", "a", "failed", found(0.1))
    run.add("other", "b", "passed", found(0.2))
    assert run.failed == ["a"]
    assert run.worst == {"one": found(0.1), "other": found(0.2)}


def report_of(folder: Path, *arguments: str) -> Any:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(MODULE)
    written = folder / "deep" / "report.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py", "--ringattn-backend", "xla"]
    kept = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "--ringattn-report", str(written), *arguments],
        env=kept | {"JAX_PLATFORMS": "cpu"}, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert [path.name for path in written.parent.iterdir()] == ["report.json"]
    return json.loads(written.read_text())


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["one process", "workers"])
def test_a_run_leaves_its_report(tmp_path: Path, arguments: tuple[str, ...]):
    report = report_of(tmp_path, *arguments)
    assert report["exit_status"] == 1
    assert report["failed"] == ["test_it.py::test_that_fails[xla]"]
    assert report["devices"]["platform"] == "cpu"
    assert report["options"] == {"full": False, "largest_ring": 8}
    backend = report["backends"]["xla"]
    assert backend["outcomes"] == {"passed": 3, "failed": 1}
    assert backend["worst"] == found(4e-6, 2e-5)
    assert backend["features"]["CAUSAL"] == "FULL"
    assert backend["requires"]["jax"] == report["versions"]["jax"]
