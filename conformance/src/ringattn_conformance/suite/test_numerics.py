# SPDX-License-Identifier: Apache-2.0
"""Rounding, extremes and poison: the error does not grow with the ring, and NaN goes where it is seen, no further."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import oracle, tiers, tolerances
from ringattn_conformance.cases import DTYPES, Case, Inputs
from ringattn_conformance.ingredients import packed
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import Placed, Placement, answer_of, place, run

NEEDS = frozenset({Feature.GRADIENTS})
ROUNDED = Case(
    "rms", batch=1, q_length=384, kv_length=384, head_dim=16, value_dim=16, dtype="bfloat16", causal=True, lse=False
)
RMS_GROWTH = 1.1
POISONED = Case("poisoned", causal=True, window=(11, 0), segments=packed, heads=4, kv_heads=2)
POISONS = {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf}
GARBAGE = {"no-numbers": (np.nan, np.inf, np.nan, 0.0), "huge": (3e38, 3e38, 3e38, -3e38)}
"""What padding holds in q, k, v and the cotangent."""
MORE: dict[str, Any] = {"sinks": "head", "bias": "NT"}
BESIDE_PADDING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "plain": MORE,
    "capped": {"soft_cap": 5.0, **MORE},
    "sloped": {"slopes": True, **MORE},
    "bfloat16": {"dtype": "bfloat16", **MORE},
}
SPOT = (1, 20, 1, 3)
"""Batch row, token, head and component of the one bad number."""


def _rms(got: dict[str, np.ndarray], answer: oracle.Answer) -> dict[str, float]:
    wanted = {"out": answer.out, **answer.gradients}
    return {name: float(np.sqrt(np.mean((x.astype(np.float64) - wanted[name]) ** 2))) for name, x in got.items()}


@tiers.core
def test_the_error_of_a_bfloat16_ring_of_eight_is_that_of_one_device(ringattn_backend: str):
    with owed(ringattn_backend, ROUNDED.needs | NEEDS) as right:
        results = {ring: run(place(ROUNDED, Placement(ring), ringattn_backend)) for ring in (1, 8)}
        if right:
            answer = answer_of(ROUNDED, 1)
            one, eight = (_rms(results[ring], answer) for ring in (1, 8))
            faults = [
                f"{name}: RMS error {eight[name]:.3g} on 8 devices, {one[name]:.3g} on one: "
                f"{eight[name] / one[name]:.3f} times, at most {RMS_GROWTH} allowed"
                for name in one
                if eight[name] > RMS_GROWTH * one[name]
            ]
            tolerances.fail_if(faults, "bfloat16 ring")


def _changed(placed: Placed, **operands: np.ndarray) -> Placed:
    problem = dataclasses.replace(placed.inputs.problem, **operands)
    return dataclasses.replace(placed, inputs=dataclasses.replace(placed.inputs, problem=problem))


def _of_one_sign(placed: Placed, operand: str) -> Placed:
    """What the bad number is multiplied with is positive: no product of it is the other infinity, none is NaN."""
    other = {"q": "k", "k": "q"}.get(operand)
    if other is None:
        return placed
    x = np.array(getattr(placed.inputs.problem, other))
    x[..., SPOT[-1]] = np.abs(x[..., SPOT[-1]])
    return _changed(placed, **{other: x})


def _poisoned(placed: Placed, operand: str, value: float) -> Placed:
    x = np.array(getattr(placed.inputs.problem, operand))
    x[SPOT] = value
    return _changed(placed, **{operand: x})


def _rows_that_see(case: Case, inputs: Inputs, operand: str) -> tuple[np.ndarray, np.ndarray]:
    """`[B, T, N]`: the queries that are or see the bad token; `[B, S, K]`: the keys that any of these sees."""
    visible = oracle.visible(inputs.problem)
    batch, token, head, _ = SPOT
    group = case.heads // case.kv_heads
    rows = np.zeros((case.batch, case.q_length, case.heads), bool)
    if operand == "q":
        rows[batch, token, head] = visible[batch, head, token].any()
    else:
        of_group = slice(head * group, (head + 1) * group)
        rows[batch, :, of_group] = visible[batch, of_group, :, token].T
    keys = np.einsum("btn,bnts->bsn", rows, visible).reshape(case.batch, case.kv_length, case.kv_heads, group).any(-1)
    return rows, keys


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_what_is_not_finite_comes_out_where_it_is_seen_and_nowhere_else(
    ringattn_backend: str, operand: str, poison: str
):
    """Rows that see it are NaN, forward and backward, and so are the gradients of keys that such rows see.

    (Of a bad value the lse and dv may stay clean.) Everything else is as if those rows had no cotangent.
    """
    layout, features = ("zigzag", {Feature.ZIGZAG}) if operand == "k" else ("contiguous", set())
    clean = _of_one_sign(place(POISONED, Placement(2, layout), ringattn_backend), operand)
    placed = _poisoned(clean, operand, POISONS[poison])
    with owed(ringattn_backend, POISONED.needs | NEEDS | features) as right:
        got = run(placed)
        if right:
            rows, keys = _rows_that_see(POISONED, clean.inputs, operand)
            assert rows.any() and not rows.all() and not keys.all()
            dout = np.where(rows[..., None], 0, clean.inputs.dout)
            dlse = np.where(np.swapaxes(rows, 1, 2), 0, np.asarray(clean.inputs.dlse))
            answer = oracle.attend(clean.inputs.problem, dout, dlse)
            bad = {"out": rows, "dq": rows, "lse": np.swapaxes(rows, 1, 2), "dk": keys, "dv": keys}
            exempt = ("lse", "dv") if operand == "v" else ()  # they do not depend on the values
            faults = [
                fault for name, x in got.items() for fault in _misplaced(name, x, bad[name], answer, name in exempt)
            ]
            tolerances.fail_if(faults, f"{poison} in {operand} on {placed.placement}")


def _misplaced(name: str, got: np.ndarray, bad: np.ndarray, answer: oracle.Answer, exempt: bool) -> list[str]:
    want = {"out": answer.out, "lse": answer.lse, **answer.gradients}[name]
    nan = np.isnan(got).reshape(*bad.shape, -1).any(-1)
    faults = [
        f"{name}: {count} rows {what}, the first at {np.argwhere(wrong)[0].tolist()}"
        for what, wrong in (("hide it", bad & ~nan & ~np.array(exempt)), ("have caught it", nan & ~bad))
        if (count := int(wrong.sum()))
    ]
    cover = bad.reshape(*bad.shape, *[1] * (got.ndim - bad.ndim)) | np.zeros(got.shape, bool)
    rest = np.where(cover, 0, got), np.where(cover, 0, want)
    fault = tolerances.difference(name, *rest, tolerances.allowed(name, "float32", want, answer.largest))
    return faults + ([fault] if fault else [])


@tiers.core
@pytest.mark.parametrize("beside", BESIDE_PADDING)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_padding_holds_harms_nobody(ringattn_backend: str, garbage: str, beside: str):
    """Numbers or not: nobody sees it, and it sees nobody."""
    case = Case("garbage", segments=_padding_among_tokens, **BESIDE_PADDING[beside])
    placed = place(case, Placement(2), ringattn_backend)
    spoilt = {name: np.array(getattr(placed.inputs.problem, name)) for name in ("q", "k", "v")}
    dout = np.array(placed.inputs.dout)
    for x, value in zip((*spoilt.values(), dout), GARBAGE[garbage], strict=True):
        x[:, _is_padding(case.q_length)] = value
    problem = dataclasses.replace(placed.inputs.problem, **spoilt)
    inputs = dataclasses.replace(placed.inputs, problem=problem, dout=dout)
    with owed(ringattn_backend, case.needs | NEEDS) as right:
        got = run(dataclasses.replace(placed, inputs=inputs))
        if right:
            tolerances.check(got, answer_of(case, 2), case, placed.inputs, f"with {garbage} in the padding")


def test_a_query_from_which_the_bias_hides_all_keys_harms_nobody(ringattn_backend: str):
    """What is no number in it, and what it holds besides: it sees nothing, as if a mask hid all keys."""
    case = Case("hidden", bias="BNT", heads=4, kv_heads=2)
    placed = place(case, Placement(2), ringattn_backend)
    bias, q = np.array(placed.inputs.problem.bias), np.array(placed.inputs.problem.q)
    bias[:, :, 5] = -np.inf
    hidden = _changed(placed, bias=bias)
    q[:, 5] = np.nan
    q[:, 5, ::2] = np.inf
    q[:, 5, :, 1::2] = 3e38
    with owed(ringattn_backend, case.needs | NEEDS) as right:
        got = run(_changed(hidden, q=q))
        if right:
            inputs = hidden.inputs
            answer = oracle.attend(inputs.problem, inputs.dout, np.asarray(inputs.dlse))
            tolerances.check(got, answer, case, inputs, "with a query that the bias hides all keys from")


def _padding_among_tokens(batch: int, rows: int, columns: int) -> Any:
    ids = np.where(_is_padding(rows), -1, 0)[None].repeat(batch, 0).astype(np.int32)
    return ids, ids


def _is_padding(rows: int) -> np.ndarray:
    """Whole tiles of it at the end, and some in every tile before."""
    number = np.arange(rows)
    return (number % 3 == 1) | (number >= 3 * rows // 4)


@tiers.core
def test_products_of_float32_are_exact_whatever_the_default_precision(ringattn_backend: str):
    case = Case("exact", head_dim=32, value_dim=32, lse=False)
    placed = place(case, Placement(2, emulated=True), ringattn_backend)
    with jax.default_matmul_precision("bfloat16"), owed(ringattn_backend, case.needs | NEEDS) as right:
        got = run(placed)
        if right:
            tolerances.check(got, answer_of(case, 2), case, placed.inputs, "with a default precision of bfloat16")


def test_one_row_of_huge_scores_does_not_disturb_the_others(ringattn_backend: str):
    case = Case("one-huge-row", causal=True)
    placed = place(case, Placement(2), ringattn_backend)
    q = np.array(placed.inputs.problem.q)
    q[:, 30] *= 1e4
    inputs = dataclasses.replace(placed.inputs, problem=dataclasses.replace(placed.inputs.problem, q=q))
    placed = dataclasses.replace(placed, inputs=inputs)
    with owed(ringattn_backend, case.needs) as right:
        got = run(placed, gradients=False)
        if right:
            answer = oracle.attend(inputs.problem)
            others = np.arange(48) != 30
            fault = tolerances.difference(
                "out",
                got["out"][:, others],
                answer.out[:, others],
                tolerances.allowed("out", "float32", answer.out, 0.0),
            )
            tolerances.fail_if([fault] if fault else [], "rows beside one of huge scores")


def test_with_numbers_of_64_bits_enabled_nothing_changes(ringattn_backend: str):
    """In more than one tile, with shared heads and bias: what counts them may be wider than what is counted."""
    case = Case(
        "wide", q_length=400, kv_length=400, head_dim=8, value_dim=8, heads=4, kv_heads=1, bias="T", causal=True
    )
    with jax.enable_x64(True):
        placed = place(case, Placement(2), ringattn_backend)
        with owed(ringattn_backend, case.needs | NEEDS) as right:
            got = run(placed)
            if right:
                tolerances.check(got, answer_of(case, 2), case, placed.inputs, "with 64 bits enabled")


@tiers.core
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_the_dtype_of_the_inputs_and_the_lse_is_float32(ringattn_backend: str, dtype: str):
    case = Case("dtypes", dtype=dtype, kv_heads=1)
    placed = place(case, Placement(2, emulated=True), ringattn_backend)
    with owed(ringattn_backend, case.needs) as right:
        out, lse = jax.eval_shape(placed.everywhere(), placed.operands, placed.fixed)
        if right:
            assert (out.dtype, lse.dtype) == (jnp.dtype(dtype), jnp.float32)
