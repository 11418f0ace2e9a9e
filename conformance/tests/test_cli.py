# SPDX-License-Identifier: Apache-2.0
"""The command: what it prints, what it writes, and the exit codes that its help promises."""

import json
import os
from pathlib import Path

import pytest
from ringattn_conformance import cli
from ringattn_testing.conformance.small_suites import Done, expecting, started


def _run(folder: Path, *arguments: str) -> Done:
    """On the cheapest file of the suite, unless the arguments say otherwise."""
    written = folder / "report.json"
    line = ("run", "xla", "--tier", "core", "--report", str(written), *arguments)
    done = started(folder, "-m", "ringattn_conformance.cli", *line)
    found = json.loads(written.read_text()) if written.is_file() else None
    return Done(done.returncode, done.stdout + done.stderr, found)


def test_a_run_that_leaves_something_out_is_not_certified(tmp_path: Path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    done = _run(tmp_path, "--", "-k", "well_formed")
    assert done.code == cli.NOT_CERTIFIED, done.text
    assert done.backend["passed"] == 1
    left_out = len(done.backend["not_run"])
    assert left_out > 100
    assert f"and none failed: {left_out} tests not run" in done.text
    assert "warning" not in done.text


def test_what_is_wrong_with_the_expectations_is_found_and_fails(tmp_path: Path):
    expecting(
        tmp_path,
        'expected-failures = {"test_protocol::test_what_is_registered_is_well_formed" = "it is not"}',
    )
    done = _run(tmp_path, "--tolerance-factor", "2", "--seed", "7", "--", "-k", "well_formed")
    assert done.code == cli.FAILED, done.text
    assert done.backend["unexpected_pass"] == ["test_protocol::test_what_is_registered_is_well_formed"]
    assert done.report["options"] == {"tier": "core", "tolerance_factor": 2, "seed": 7}


@pytest.mark.parametrize(
    "arguments",
    [
        ("nobody",),
        ("xla", "--expectations", "lost.toml"),
        ("xla", "--tier", "best"),
        ("xla", "--tolerance-factor", "nan"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_used_is_told_apart(tmp_path: Path, arguments: tuple[str, ...]):
    done = started(tmp_path, "-m", "ringattn_conformance.cli", "run", *arguments)
    assert done.returncode == cli.UNUSABLE, done.stdout + done.stderr


@pytest.mark.parametrize("workers", ["0", "3"])
def test_workers_multiply_matrices_in_one_thread_each(workers: str, monkeypatch: pytest.MonkeyPatch):
    """One process alone may use all cores."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "environ", {**os.environ})  # what the command sets must not reach other tests
    threads = []
    monkeypatch.setattr(pytest, "main", lambda _: threads.append(os.environ.get("OPENBLAS_NUM_THREADS")) or 1)
    assert cli.main(["run", "xla", "-n", workers]) == cli.UNUSABLE
    assert threads == [None if workers == "0" else "1"]
