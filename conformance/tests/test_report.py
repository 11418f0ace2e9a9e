# SPDX-License-Identifier: Apache-2.0
"""The report: of all errors it keeps the worst of each result, and a failure in any phase of a test stays one."""

from typing import Any

from ringattn_conformance import notes
from ringattn_conformance.collection import Collection, Name
from ringattn_conformance.report import Run, document
from ringattn_conformance.schema import Options

OPTIONS: Options = {"tier": "full", "largest_ring": 8, "tolerance_factor": 1.0}


def found(error: float, tolerance: float = 1.0, needed: tuple[str, ...] = ("CAUSAL",)) -> dict[str, Any]:
    worst = {"float32": {"out": {"error": error, "tolerance": tolerance}}}
    return {"needed": needed, "refused": (), "rings": [], "worst": worst}


def made(run: Run) -> Any:
    return document(run, Collection(), {"xla": {}}, OPTIONS, 0)["backends"]["xla"]


def test_of_all_errors_the_one_nearest_to_its_tolerance_stays():
    run = Run()
    for number, errors in enumerate((found(0.5, 10.0), found(0.2, 1.0), found(0.3, 10.0, needed=()))):
        run.add(f"node {number}", Name("xla", f"t{number}", ""), "passed", errors)
    backend = made(run)
    assert backend["worst"] == {"float32": {"out": {"error": 0.2, "tolerance": 1.0, "test": "t1"}}}
    assert backend["features"]["CAUSAL"]["worst"]["test"] == "t1"
    assert backend["outcomes"] == {"passed": 3}
    assert backend["features"]["CAUSAL"]["outcomes"] == {"passed": 2}


def test_a_test_of_another_backend_is_not_counted_and_one_of_no_backend_is():
    run = Run()
    run.add("1", Name("triton", "a", ""), "failed", {})
    run.add("2", Name(None, "b", ""), "failed", {})
    assert made(run)["failed"] == ["b"]


def test_a_failure_after_the_call_stays_and_keeps_what_the_call_found():
    run = Run()
    run.add("1", Name("xla", "a", ""), "passed", found(0.2))
    run.add("1", Name("xla", "a", ""), "failed", {})
    run.add("1", Name("xla", "a", ""), "passed", {})
    backend = made(run)
    assert backend["outcomes"] == {"failed": 1}
    assert backend["worst"]["float32"]["out"]["error"] == 0.2


def test_a_backend_is_described_with_what_it_requires():
    backend = made(Run())
    assert backend["distribution"] == "ringattn-xla"
    assert backend["kind"] == "block kernel"
    assert backend["requires"]["jax"]
    assert backend["features"]["CAUSAL"]["support"] == "FULL"


def test_notes_are_taken_once_and_of_two_errors_the_worse_stays():
    notes.take()
    for error in (1e-6, 4e-6, 2e-6):
        notes.error("float32", "out", error, 2e-5)
    assert notes.take()["worst"] == {"float32": {"out": {"error": 4e-6, "tolerance": 2e-5}}}
    assert notes.take()["worst"] == {}
