# SPDX-License-Identifier: Apache-2.0
"""The comparison of two reports: it shows what changed and nothing else, and knows what is for the worse."""

import copy
from typing import Any

import pytest
from ringattn_conformance import comparison
from sample_reports import report


def _text(before: Any, after: Any) -> str:
    return "\n".join(" ".join(line.split()) for line in comparison.lines(before, after))


def _feature(support: str) -> Any:
    found = copy.deepcopy(report()["backends"]["acme"]["features"])
    found["BIAS"]["support"] = support
    return found


def _error(size: float) -> Any:
    return {"float16": {"out": {"error": size, "tolerance": 2e-3, "test": "t"}}}


def test_equal_reports_have_nothing_to_tell():
    assert comparison.lines(report(), report()) == [
        "the runs:", "nothing changed", "", "backend acme:", "nothing changed",
    ]  # fmt: skip
    assert comparison.worse(report(), report()) == []


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"versions": {"jax": "0.11.2", "ringattn-core": "0.1.0"}}, "jax 0.10.2 0.11.2"),
        ({"versions": {"jax": "0.10.2"}}, "ringattn-core 0.1.0 -"),
        ({"environment": {"JAX_PLATFORMS": "cuda"}}, "$JAX_PLATFORMS cpu cuda"),
        ({"devices": {"platform": "gpu", "kind": "H200", "count": 4}}, "devices 8 cpu cpu 4 gpu H200"),
        ({"tier": "full"}, "tier core full"),
        ({"tolerance_factor": 2.0}, "tolerance factor 1.0 2.0"),
        ({"uncollected": ["test_ring"]}, "files left out none test_ring"),
        ({"version": "1.3.0"}, "version 1.2.3 1.3.0"),
        ({"requires": {"jax": "0.11.2"}}, "requires jax 0.10.2 0.11.2"),
        ({"failed": ["test_ring::a"]}, "test test_ring::a fine failed"),
        ({"expected_failures": {"test_ring::a": "hard"}}, "test test_ring::a fine failed as expected"),
        ({"deselected": ["test_ring::a"]}, "test test_ring::a fine deselected"),
        ({"outcomes": {"passed": 200}}, "passed, in all 188 200"),
        ({"features": _feature("FULL")}, "BIAS planned full"),
        ({"rings": {"2": {"real": 43, "emulated": 0}}}, "a ring of 2 40 tests real and 3 tests emulated 43 tests real"),
        ({"worst": _error(1e-3)}, "worst error of out, float16 20.0% of tolerance 50.0% of tolerance"),
        ({"worst": {}}, "worst error of out, float16 20.0% of tolerance -"),
    ],
)
def test_what_changed_is_a_row_with_both_values(changes: dict[str, Any], row: str):
    assert row in _text(report(), report(**changes))
    assert row not in _text(report(**changes), report(**changes))


def test_errors_of_about_the_same_size_are_the_same():
    assert "worst error" not in _text(report(), report(worst=_error(5e-4)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"failed": ["test_ring::a"]}, "acme: test_ring::a fails"),
        ({"unexpected_passes": ["test_ring::a"]}, "acme: test_ring::a fails"),
        ({"deselected": ["test_ring::a"]}, "acme: NOT CERTIFIED for the core tier: 1 test deselected"),
        ({"features": {}}, "acme: CAUSAL is no longer supported"),
    ],
)
def test_what_is_lost_is_for_the_worse_and_what_is_won_is_not(changes: dict[str, Any], sentence: str):
    assert sentence in comparison.worse(report(), report(**changes))
    assert comparison.worse(report(**changes), report()) == []


def test_of_two_backends_that_are_alone_one_is_held_against_the_other():
    assert "backend acme -> other:" in comparison.lines(report(), report("other"))


def test_of_several_each_is_held_against_its_namesake():
    both: Any = report()
    both["backends"]["other"] = both["backends"]["acme"]
    assert "backend other: only in the second report" in comparison.lines(report(), both)
    assert comparison.worse(both, report()) == ["other is no longer there"]
