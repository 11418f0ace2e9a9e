# SPDX-License-Identifier: Apache-2.0
"""The results: what of all tests stays, and a certificate that is given only where nothing spoils it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ringattn_conformance import cli, notes, results
from ringattn_conformance.collection import Name
from ringattn_conformance.results import Ran

LISTS = dict.fromkeys(("unknown", "deselected", "not_run", "uncollected", "crashed"), ())
OPTIONS = {"tier": "core", "largest_ring": 8, "tolerance_factor": 1.0, "seed": 7}


def noted(*needed: str, error: float | None = 0.5, tolerance: float = 1.0) -> dict[str, Any]:
    worst = {} if error is None else {"float32": {"out": {"error": error, "tolerance": tolerance}}}
    return {"needed": needed, "rings": [[2, "real"]], "worst": worst}


def ran(number: int, outcome: str = "passed", **kept: Any) -> Ran:
    return Ran(Name("xla", f"t{number}", ""), outcome, kept.get("notes", noted("FLOAT32")))


def of_run(*tests: Ran, exit_status: int = 0, **changes: Any) -> Any:
    """The results of these tests of xla; a change is of the options or of the backend."""
    backend = results.of_backend("xla", tests or [ran(0)], LISTS, {}) | {"untried": []}
    options = {name: changes.pop(name, x) for name, x in OPTIONS.items()}
    return results.of_run(options, {"xla": backend | changes}, exit_status)


def certificate(**changes: Any) -> Any:
    return of_run(**changes)["backends"]["xla"]["certificate"]


def test_of_all_errors_the_one_nearest_to_its_tolerance_stays():
    errors = ((0.5, 10.0), (0.2, 1.0), (0.3, 10.0))
    tests = [ran(n, notes=noted("CAUSAL", error=e, tolerance=t)) for n, (e, t) in enumerate(errors)]
    backend = of_run(*tests)["backends"]["xla"]
    assert backend["worst"] == {"float32": {"out": {"error": 0.2, "tolerance": 1.0, "test": "t1"}}}
    assert backend["passed"] == 3
    assert backend["rings"] == {"2": {"real": 3, "emulated": 0}}


def test_what_is_written_is_plain_json_whole_or_not_at_all(tmp_path: Path):
    found, path = of_run(), tmp_path / "new" / "report.json"
    results.write(path, found)
    assert json.loads(path.read_text()) == found
    assert [one.name for one in path.parent.iterdir()] == ["report.json"]
    backend = found["backends"]["xla"]
    assert backend["distribution"] == "ringattn-xla" and backend["kind"] == "block kernel"
    assert found["versions"]["jax"] and "CAUSAL" in backend["declared"]


def test_notes_are_taken_once_and_of_two_errors_the_worse_stays():
    notes.take()
    for error in (1e-6, 4e-6, 2e-6):
        notes.error("float32", "out", error, 2e-5)
    assert notes.take()["worst"] == {"float32": {"out": {"error": 4e-6, "tolerance": 2e-5}}}
    assert notes.take()["worst"] == {}


def test_what_no_passing_test_compared_in_a_declared_dtype_is_untried():
    tests = [
        ran(0, notes=noted("CAUSAL", "FLOAT32", "GRADIENTS", "BIAS")),
        ran(1, notes=noted("BFLOAT16", "GRADIENTS")),
        ran(2, "failed", notes=noted("CAUSAL", "BFLOAT16")),
        ran(3, notes=noted("CAUSAL", "BFLOAT16", error=None)),
    ]
    declared = ("GRADIENTS", "FLOAT32", "BFLOAT16", "CAUSAL", "BIAS")
    assert results.untried(declared, tests) == ["CAUSAL in bfloat16", "BIAS in bfloat16"]
    assert results.untried(("FLOAT32", "FLOAT16"), tests) == ["FLOAT16"]


def test_precision_is_owed_in_float32_alone():
    tests = [ran(0, notes=noted("PRECISION", "FLOAT32")), ran(1, notes=noted("BFLOAT16"))]
    assert results.untried(("FLOAT32", "BFLOAT16", "PRECISION"), tests) == []


def test_a_certificate_is_given_where_nothing_spoils_it_and_names_what_it_is_about():
    assert certificate() == {"given": True, "tier": "core", "spoiled_by": []}
    assert certificate(tolerance_factor=0.5)["given"], "stricter tolerances do not spoil it"
    found = of_run()
    title = results.title("xla", found["backends"]["xla"], found)
    for part in ("xla 0.1.0 on", found["versions"]["jax"], found["date"][:10], "seed 7"):
        assert part in title


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"expected_failure": {"a": "NaN spreads", "b": "NaN spreads"}}, ", with 2 expected failures"),
        ({"half_partials": True}, ", with partial results in half precision"),
    ],
)
def test_it_says_with_what_it_is_given(changes: dict[str, Any], more: str):
    found = of_run(**changes)
    assert results.verdict(found["backends"]["xla"]) == f"CERTIFIED for the core tier{more}"
    assert cli.exit_code(found) == cli.CERTIFIED


@pytest.mark.parametrize(
    ("changes", "reason", "code"),
    [
        ({"failed": ["a"]}, "1 test failed", cli.FAILED),
        ({"failed": ["a", "b"]}, "2 tests failed", cli.FAILED),
        ({"crashed": ["a"]}, "1 test crashed the process", cli.FAILED),
        ({"unexpected_pass": ["a", "b"]}, "2 tests passed unexpectedly", cli.FAILED),
        ({"unknown": ["a"]}, "1 test expected to fail and not in the suite", cli.FAILED),
        ({"deselected": ["a", "b"]}, "2 tests deselected", cli.NOT_CERTIFIED),
        ({"skipped": ["a"]}, "1 test skipped", cli.NOT_CERTIFIED),
        ({"not_run": ["a"]}, "1 test selected and not run", cli.NOT_CERTIFIED),
        ({"untried": ["BIAS in float16"]}, "declared, not tried: BIAS in float16", cli.NOT_CERTIFIED),
        ({"uncollected": ["test_ring"]}, "not collected: test_ring", cli.NOT_CERTIFIED),
        ({"tolerance_factor": 1.5}, "every tolerance was multiplied by 1.5", cli.NOT_CERTIFIED),
        ({"largest_ring": 4}, "no case was tried on a ring of more than 4 by turns", cli.NOT_CERTIFIED),
        ({"platforms": ["cuda", "rocm"]}, "it ran on cpu, and declares cuda, rocm", cli.NOT_CERTIFIED),
        ({"exit_status": 2}, "pytest ended with exit status 2", cli.NOT_CERTIFIED),
    ],
)
def test_each_of_these_spoils_it_and_is_its_reason(changes: dict[str, Any], reason: str, code: int):
    found = of_run(**copy.deepcopy(changes))
    assert found["backends"]["xla"]["certificate"]["spoiled_by"] == [reason]
    assert cli.exit_code(found) == code


def test_all_reasons_are_told_at_once():
    found = of_run(failed=["a"], deselected=["b"])["backends"]["xla"]
    assert results.verdict(found) == "NOT CERTIFIED for the core tier: 1 test failed; 1 test deselected"
    assert results.verdict(of_run(deselected=["b"])["backends"]["xla"]) == (
        "NOT CERTIFIED for the core tier, though 1 tests passed and none failed: 1 test deselected"
    )
