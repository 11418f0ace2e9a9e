# SPDX-License-Identifier: Apache-2.0
"""What counts as tried: a passing test that compared numbers, in each declared dtype."""

from typing import Any

from ringattn_conformance import coverage

DECLARED = ("GRADIENTS", "FLOAT32", "BFLOAT16", "CAUSAL", "BIAS")


def notes(*needed: str, rings: tuple[int, ...] = (2,), worst: bool = True) -> dict[str, Any]:
    return {"needed": needed, "rings": [(ranks, "real") for ranks in rings], "worst": {"x": {}} if worst else {}}


def test_a_feature_counts_once_for_each_passing_test_by_dtype():
    tests = [
        ("passed", notes("CAUSAL", "FLOAT32")),
        ("passed", notes("CAUSAL", "FLOAT32", "BIAS")),
        ("passed", notes("CAUSAL", "BFLOAT16")),
    ]
    assert coverage.tried("CAUSAL", coverage.compared(tests)) == {"FLOAT32": 2, "BFLOAT16": 1}
    assert coverage.tried("BIAS", coverage.compared(tests)) == {"FLOAT32": 1}


def test_a_test_that_failed_or_compared_nothing_does_not_count():
    tests = [("failed", notes("CAUSAL", "FLOAT32")), ("passed", notes("CAUSAL", "FLOAT32", worst=False))]
    assert coverage.compared(tests) == []


def test_what_no_test_compared_in_a_declared_dtype_is_untried():
    tests = [("passed", notes("CAUSAL", "FLOAT32", "GRADIENTS", "BIAS")), ("passed", notes("BFLOAT16", "GRADIENTS"))]
    found = coverage.untried(DECLARED, coverage.compared(tests))
    assert found == ["CAUSAL in bfloat16", "BIAS in bfloat16"]
    assert coverage.untried(("FLOAT32", "FLOAT16"), coverage.compared(tests)) == ["FLOAT16"]


def test_precision_is_owed_in_float32_alone():
    passes = coverage.compared([("passed", notes("PRECISION", "FLOAT32")), ("passed", notes("BFLOAT16"))])
    assert coverage.untried(("FLOAT32", "BFLOAT16", "PRECISION"), passes) == []


def test_a_pair_is_covered_where_one_test_had_both():
    passes = coverage.compared([("passed", notes("CAUSAL", "FLOAT32", "ZIGZAG", rings=(2, 4)))])
    found = coverage.uncovered(("FLOAT32", "CAUSAL", "ZIGZAG", "TWO_WAY"), passes)
    assert "CAUSAL with ZIGZAG" not in found and "ZIGZAG with ring of 4" not in found
    assert {"CAUSAL with CONTIGUOUS", "ZIGZAG with ring of 8", "CAUSAL with TWO_WAY"} <= set(found)
    assert not {"ZIGZAG with ring of 1", "TWO_WAY with ring of 2", "ZIGZAG with CONTIGUOUS"} & set(found)
