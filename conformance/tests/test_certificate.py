# SPDX-License-Identifier: Apache-2.0
"""The certificate: given where every test of the tier ran by the rules, and withheld with the reason otherwise."""

import pytest
from ringattn_conformance import summary
from sample_reports import report


def _certificate(**changes):
    return report(**changes)["backends"]["acme"]["certificate"]


def test_it_is_given_where_nothing_spoils_it():
    assert _certificate() == {"given": True, "tier": "core", "spoiled_by": []}


def test_failures_that_are_expected_are_part_of_it():
    found = report(expected_failures={"test_ring::a": "NaN spreads", "test_ring::b": "NaN spreads"})
    assert found["backends"]["acme"]["certificate"]["given"]
    assert summary.verdict(found["backends"]["acme"]) == "CERTIFIED for the core tier, with 2 expected failures"


def test_it_says_that_partial_results_are_in_half_precision():
    found = report(half_partials=True)["backends"]["acme"]
    assert summary.verdict(found) == "CERTIFIED for the core tier, with partial results in half precision"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failed": ["a"]}, "1 test failed"),
        ({"failed": ["a", "b"]}, "2 tests failed"),
        ({"crashes": ["a"]}, "1 test crashed the process"),
        ({"unexpected_passes": ["a", "b"]}, "2 tests passed unexpectedly"),
        ({"unknown_expectations": ["a"]}, "1 test expected to fail and not in the suite"),
        ({"deselected": ["a", "b"]}, "2 tests deselected"),
        ({"skipped": ["a"]}, "1 test skipped"),
        ({"not_run": ["a"]}, "1 test selected and not run"),
        ({"untried": ["BIAS in float16"]}, "declared, not tried: BIAS in float16"),
        ({"uncollected": ["test_ring"]}, "test_ring was not collected"),
        ({"tolerance_factor": 1.5}, "every tolerance was multiplied by 1.5"),
        ({"largest_ring": 4}, "no case was tried on a ring of more than 4 by turns"),
        ({"exit_status": 2}, "pytest ended with exit status 2"),
    ],
)
def test_each_of_these_spoils_it_and_is_its_reason(changes, reason: str):
    found = _certificate(**changes)
    assert not found["given"]
    assert found["spoiled_by"] == [reason]


def test_stricter_tolerances_do_not_spoil_it():
    assert _certificate(tolerance_factor=0.5)["given"]


def test_all_reasons_are_told_at_once():
    found = report(failed=["a"], deselected=["b"])["backends"]["acme"]
    assert summary.verdict(found) == "NOT CERTIFIED for the core tier: 1 test failed; 1 test deselected"
