# SPDX-License-Identifier: Apache-2.0
"""The results: what of all tests stays, and a certificate that is given only where nothing spoils it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ringattn_conformance import cli, results

LISTS = dict.fromkeys(("unknown", "not_run", "uncollected", "untried", "crashed"), ())
OPTIONS = {"tier": "core", "tolerance_factor": 1.0, "seed": 7}


PASSED = {"test_ring::test_of_this": "passed"}


def of_run(exit_status: int = 0, **changes: Any) -> Any:
    """The results of these tests of xla; a change is of the options or of the backend."""
    backend = results.of_backend("xla", PASSED, LISTS, {})
    options = {name: changes.pop(name, x) for name, x in OPTIONS.items()}
    return results.of_run(options, {"xla": backend | changes}, exit_status)


def certificate(**changes: Any) -> Any:
    return of_run(**changes)["backends"]["xla"]["certificate"]


def test_what_is_written_is_plain_json(tmp_path: Path):
    found, path = of_run(), tmp_path / "new" / "report.json"
    results.write(path, found)
    assert json.loads(path.read_text()) == found
    backend = found["backends"]["xla"]
    assert backend["distribution"] == "ringattn-xla" and backend["kind"] == "block kernel"
    assert found["versions"]["jax"] and "CAUSAL" in backend["declared"]


def test_a_certificate_is_given_where_nothing_spoils_it():
    assert certificate() == {"given": True, "passed": True, "tier": "core", "spoiled_by": []}
    assert certificate(tolerance_factor=0.5)["given"], "stricter tolerances do not spoil it"


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"expected_failure": {"a": "NaN spreads", "b": "NaN spreads"}}, ", with 2 expected failures"),
        ({"half_partials": True}, ", with partial results in half precision"),
        ({"largest_head": 256, "head_multiple": 8}, ", with heads of at most 256, with head sizes that 8 divides"),
    ],
)
def test_it_says_with_what_it_is_given(changes: dict[str, Any], more: str):
    found = of_run(**changes)
    assert results.verdict("xla", found).endswith(f"CERTIFIED for the core tier{more}")
    assert cli.exit_code(found) == cli.CERTIFIED


@pytest.mark.parametrize(
    ("changes", "reason", "code"),
    [
        ({"failed": ["a", "b"]}, "2 tests failed", cli.FAILED),
        ({"crashed": ["a"]}, "1 test crashed the process", cli.FAILED),
        ({"unexpected_pass": ["a", "b"]}, "2 tests passed unexpectedly", cli.FAILED),
        ({"unknown": ["a"]}, "1 test expected to fail and not in the suite", cli.FAILED),
        ({"skipped": ["a"]}, "1 test skipped", cli.NOT_CERTIFIED),
        ({"not_run": ["a"]}, "1 test not run", cli.NOT_CERTIFIED),
        ({"untried": ["BIAS in float16"]}, "declared, not tried: BIAS in float16", cli.NOT_CERTIFIED),
        ({"uncollected": ["test_ring"]}, "not collected: test_ring", cli.NOT_CERTIFIED),
        ({"tolerance_factor": 1.5}, "every tolerance was multiplied by 1.5", cli.NOT_CERTIFIED),
        ({"platforms": ["cuda", "rocm"]}, "it ran on cpu, and declares cuda, rocm", cli.NOT_CERTIFIED),
        ({"exit_status": 2}, "pytest ended with exit status 2", cli.NOT_CERTIFIED),
    ],
)
def test_each_of_these_spoils_it_and_is_its_reason(changes: dict[str, Any], reason: str, code: int):
    found = of_run(**copy.deepcopy(changes))
    judgement = found["backends"]["xla"]["certificate"]
    assert judgement["spoiled_by"] == [reason]
    assert judgement["passed"] is ("platforms" in changes), "on other devices it passes without a certificate"
    assert cli.exit_code(found) == code
