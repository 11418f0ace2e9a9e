# SPDX-License-Identifier: Apache-2.0
"""The comparison: as strict as the specification, and a failure says all that is needed."""

import dataclasses

import numpy as np
import pytest
from ringattn_conformance import comparison
from ringattn_conformance.cases import Case
from ringattn_conformance.oracle import Answer, attend, distances
from ringattn_conformance.ranks import Placement
from ringattn_testing.conformance.numpy_ring import Fused, OneAfterAnother, run


def test_the_table_is_that_of_the_specification():
    assert comparison.FORWARD == {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
    assert comparison.GRADIENTS == {"float32": 5e-5, "float16": 5e-3, "bfloat16": 2.5e-2}


@pytest.mark.parametrize(
    ("quantity", "want", "largest", "tolerance"),
    [
        ("out", [100.0], 1.0, 2e-5),
        ("lse", [100.0], 32.0, 2e-5),
        ("out", [1.0], 64.0, 4e-5),
        ("dq", [0.01], 1.0, 5e-6),
        ("dq", [-4.0, 1.0], 1.0, 2e-4),
        ("dbias", [2.0, -np.inf], 320.0, 1e-3),
    ],
)
def test_tolerances_grow_with_gradients_and_with_scores_beyond_32(quantity, want, largest, tolerance):
    assert comparison.allowed(quantity, "float32", np.array(want), largest) == pytest.approx(tolerance)


def test_the_rounding_of_float32_passes_where_scores_are_large_before_a_small_soft_cap():
    """Scores of 300 before a cap of 2: the error of their products is that of uncapped scores of this size."""
    case = Case(
        "capped-2", batch=1, heads=4, gain=80.0, soft_cap=2.0, chunk=3, q_length=144, kv_length=144, head_dim=256,
        value_dim=64, lse=True,
    )  # fmt: skip
    exact = attend(case.inputs.problem)
    assert exact.largest <= 2 < 250 < exact.uncapped
    rounded = run(case, Placement(1), OneAfterAnother())
    error = float(np.abs(rounded["lse"] - exact.lse).max())
    assert comparison.allowed("lse", "float32", exact.lse, exact.largest) < error
    assert error < comparison.allowed("lse", "float32", exact.lse, exact.largest, exact.uncapped)
    assert comparison.allowed("lse", "bfloat16", exact.lse, exact.largest, exact.uncapped) == 2e-2


def test_the_rounding_of_operands_to_tf32_passes_where_scores_are_large_before_a_small_soft_cap():
    """Scores of 300 before a cap of 2, from operands rounded to 10 bits of mantissa, in exact arithmetic."""
    case = Case(
        "capped-2", batch=1, heads=4, gain=80.0, soft_cap=2.0, q_length=144, kv_length=144, head_dim=256, chunk=3,
        value_dim=64, lse=True, precision="default",
    )  # fmt: skip
    problem = case.inputs.problem
    exact = attend(problem)
    rounded = attend(dataclasses.replace(problem, q=_with_bits(problem.q, 11), k=_with_bits(problem.k, 11)))
    assert np.abs(rounded.lse - exact.lse).max() > comparison.allowed("lse", "bfloat16", exact.lse, exact.largest)
    got = {"out": rounded.out.astype(np.float32), "lse": rounded.lse.astype(np.float32)}
    assert comparison.against_oracle(got, exact, case) == []
    assert comparison.against_oracle(got, exact, dataclasses.replace(case, precision=None)) != []


def _of_one_key(case: Case) -> tuple[Answer, np.ndarray, np.ndarray]:
    """The answer where every query sees the first key alone, and `dp` and `delta`, `[B, N, T]`, which are then equal.

    They are float32 sums of the same products in opposite orders, so their difference is rounding.
    """
    problem = dataclasses.replace(case.inputs.problem, kv_range=(0, 0))
    products = np.moveaxis(case.inputs.dout * problem.v[:, :1], (3, 2), (0, 2))
    dp, delta = (np.add.accumulate(x, 0, dtype=np.float32)[-1] for x in (products, products[::-1]))
    return attend(problem, case.inputs.dout), dp, delta


def _with_bits(x: np.ndarray, bits: int) -> np.ndarray:
    """`x` rounded to this many significant bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 2.0**bits), exponent - bits).astype(np.float32)


def _without_slack(answer: Answer) -> Answer:
    return dataclasses.replace(answer, slack={})


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_slopes_may_have_the_rounding_of_float32_where_its_terms_cancel(seed: int):
    case = Case("far-key", q_length=256, kv_length=256, value_dim=64, slopes=1.0, seed=seed)
    answer, dp, delta = _of_one_key(case)
    distance = distances(case.inputs.problem)[..., 0].astype(np.float32)

    def faults(delta: np.ndarray, answer: Answer) -> list[str]:
        dslopes = -np.sum((dp - delta) * distance, (0, 2), dtype=np.float32)
        return comparison.against_oracle({"dslopes": dslopes}, answer, case)

    assert faults(delta, answer) == []
    assert faults(delta, _without_slack(answer)) != []
    assert faults(_with_bits(delta, 16), answer) != []


def test_gradients_may_have_the_rounding_of_long_float32_sums_where_their_terms_cancel():
    """A query that sees one key has `dp - delta` of 0, but each is a sum of as many products as values are long."""
    case = Case("one-key", q_length=256, kv_length=256, head_dim=2, value_dim=512, bias="")
    answer, dp, delta = _of_one_key(case)
    k = case.inputs.problem.k[:, :1]

    def faults(delta: np.ndarray, answer: Answer) -> list[str]:
        ds = dp - delta
        dbias = np.zeros(answer.gradients["dbias"].shape, np.float32)
        dbias[..., 0] = ds.sum(dtype=np.float32)
        got = {"dq": 2**-0.5 * np.swapaxes(ds, 1, 2)[..., None] * k, "dbias": dbias}
        return [fault.partition(":")[0] for fault in comparison.against_oracle(got, answer, case)]

    assert faults(delta, answer) == []
    assert faults(delta, _without_slack(answer)) == ["dq", "dbias"]
    short = {name: np.asarray(x) * 4 / 512**0.5 for name, x in answer.slack.items()}
    assert "dq" in faults(delta, dataclasses.replace(answer, slack=short))
    assert faults(_with_bits(delta, 12), answer) == ["dq", "dbias"]


def test_gradients_may_have_the_rounding_of_tf32_where_their_terms_cancel_if_the_precision_is_lower():
    case = Case("one-key", q_length=256, kv_length=256, head_dim=2, value_dim=64, precision="default")
    answer, _, delta = _of_one_key(case)
    v, dout, k = (_with_bits(x, 11) for x in (case.inputs.problem.v[:, :1], case.inputs.dout, case.inputs.problem.k))
    ds = np.sum(dout * v, -1) - np.swapaxes(delta, 1, 2)

    def faults(ds: np.ndarray, answer: Answer) -> list[str]:
        return comparison.against_oracle({"dq": 2**-0.5 * ds[..., None] * k[:, :1]}, answer, case)

    assert faults(ds, answer) == []
    assert faults(ds, _without_slack(answer)) != []
    assert faults(32 * ds, answer) != []


def test_the_gradient_of_sinks_may_have_the_rounding_of_tf32_where_its_terms_cancel_if_the_precision_is_lower():
    """With this seed it is a hundredth of what a sum of so many terms usually is."""
    case = Case(
        "shared-sinks", batch=1, q_length=2000, kv_length=9, heads=4, kv_heads=1, head_dim=16, value_dim=4,
        sinks="shared", precision="default", seed=26,
    )  # fmt: skip
    problem = case.inputs.problem
    q, k, v, dout = (_with_bits(x, 11) for x in (problem.q, problem.k, problem.v, case.inputs.dout))
    dsinks = attend(dataclasses.replace(problem, q=q, k=k, v=v), dout).gradients["dsinks"]

    def faults(dsinks: np.ndarray, answer: Answer) -> list[str]:
        return comparison.against_oracle({"dsinks": dsinks.astype(np.float32)}, answer, case)

    exact = case.answer.gradients["dsinks"]
    assert faults(dsinks, case.answer) == []
    assert faults(dsinks, _without_slack(case.answer)) != []
    assert faults(exact + 8 * (dsinks - exact), case.answer) != []


def test_weights_may_be_rounded_before_they_are_divided_by_what_dropout_keeps():
    """Float16 rounds the weights of far keys, which are small, to multiples of 6e-8; the division makes that 6e-6."""
    case = Case(
        "far-keys", batch=1, q_length=1, kv_length=200, heads=7, kv_heads=1, value_dim=24, dtype="float16", slopes=1.0,
        dropout=0.99, positions="at-the-end", seed=2,
    )  # fmt: skip
    got = run(case, Placement(1), Fused())
    comparison.check(got, case.answer, case)
    small = np.abs(got["dv"]) < 1e-2 * np.abs(got["dv"]).max()
    assert comparison.against_oracle({"dv": np.where(small, 0, got["dv"])}, case.answer, case) != []


def test_the_factor_of_the_run_multiplies_every_tolerance(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "factor", 3.0)
    assert comparison.allowed("out", "float32", np.array([1.0]), 1.0) == pytest.approx(6e-5)
    assert comparison.allowed("dq", "bfloat16", np.array([2.0]), 1.0) == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("got", "want", "equal"),
    [
        (np.nan, 0.0, False),
        (0.0, np.nan, False),
        (np.nan, np.nan, True),
        (-np.inf, -np.inf, True),
        (np.inf, -np.inf, False),
        (-np.inf, -1e30, False),
        (1e-3, 0.0, True),
    ],
)
def test_nan_and_infinities_must_be_equal_place_for_place(got, want, equal):
    assert (not comparison.difference("out", np.array([got]), np.array([want]), 0.01)) is equal


def test_a_failure_names_the_case_and_every_fault():
    case = Case("named", causal=True)
    inputs = case.inputs
    answer = attend(inputs.problem, inputs.dout, inputs.dlse)
    right = {"out": answer.out.astype(np.float32), "dk": answer.gradients["dk"].astype(np.float32)}
    comparison.check(right, answer, case)
    with pytest.raises(AssertionError) as failure:
        comparison.check({"out": -right["out"], "dk": right["dk"].astype(np.float16)}, answer, case, "on ring9")
    message = str(failure.value)
    assert message.startswith("case 'named' on ring9: causal=True\n  out: worst at [")
    assert "dk: got dtype float16, want float32" in message or "dk: worst at" in message
    with pytest.raises(AssertionError, match=r"out: got shape \(1,\), want"):
        comparison.check({"out": np.zeros(1)}, answer, case)


def test_half_partials_double_the_tolerances_of_half_precision_only(monkeypatch: pytest.MonkeyPatch):
    def both():
        return [comparison.allowed("out", dtype, np.array([1.0]), 1.0) for dtype in ("float32", "bfloat16")]

    exact, rounded = both()
    monkeypatch.setattr(comparison, "half_partials", True)
    assert both() == [exact, 2 * rounded]


@pytest.mark.parametrize(("bias", "faults"), [("BNT", 0), ("NT", 1), ("T", 1)])
def test_only_the_gradient_of_a_bias_that_is_not_broadcast_may_be_rounded_to_half_precision(bias: str, faults: int):
    inputs = Case("bias", bias=bias).inputs
    answer = attend(inputs.problem, inputs.dout)
    rounded = answer.gradients["dbias"].astype(np.float16).astype(np.float32)
    found = comparison.rounded_to_half({"dbias": rounded}, answer)
    assert len(found) == faults and all("rounded to float16" in line for line in found)


@pytest.mark.parametrize(("below", "faults"), [(1e-8, 0), (3e-7, 0), (1e-5, 2)])
def test_a_largest_score_that_is_the_soft_cap_to_within_float32_is_not_taken_for_rounded(below: float, faults: int):
    """The tanh of a large score is 1 in float32; the oracle has a number a little below."""
    answer = dataclasses.replace(attend(Case("capped").inputs.problem), max_logits=np.array([0.5 - below] * 2))
    assert len(comparison.rounded_to_half({"max_logits": np.full(2, 0.5, np.float32)}, answer)) == faults


@pytest.mark.parametrize(
    ("at", "told"),
    [
        (np.s_[:, :, :, 37:], ""),
        (np.s_[0, 37:, 3], ": batch row 0, queries 37.., head 3 (the last of 4)"),
        (np.s_[1, 5:9, :2], ": batch row 1 (the last of 2), queries 5..8, heads 0..1"),
        (np.s_[:, 7::8], ": every 8th query from 7 on"),
        (np.s_[:, [1, 5, 6]], ": queries 1, 5, 6"),
        (np.s_[:, [1, 5, 6, 8, 40]], ": 5 of 64 queries from 1 to 40"),
    ],
)
def test_a_difference_names_the_rows_and_heads_that_are_wrong(at, told):
    got, want = np.zeros((2, 64, 4, 8)), np.zeros((2, 64, 4, 8))
    got[at] = 1
    if not told:
        got[:] = 1
    (fault,) = comparison.difference("out", got, want, 0.1)
    assert fault.partition("elements beyond it")[2] == told


@pytest.mark.parametrize(("value", "told"), [(np.nan, "; 768 NaN"), (5.0, "")])
def test_wrong_values_in_rows_that_see_no_key_are_named_as_such(value: float, told: str):
    problem = Case("late", segments="unseen-ranks").inputs.problem
    answer = attend(problem)
    got = np.where(np.swapaxes(answer.empty, 1, 2)[..., None], value, answer.out)
    (fault,) = comparison.difference("out", got, answer.out, 0.1, answer.empty)
    assert fault.endswith(f": queries 0..23; all in rows that see no key{told}")
    got[0, -1] = np.nan
    (fault,) = comparison.difference("out", got, answer.out, 0.1, answer.empty)
    assert "see no key" not in fault
