# SPDX-License-Identifier: Apache-2.0
"""Rounding and extreme values: the error does not grow with the ring, padding is harmless, and NaN is not hidden."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import oracle, tiers, tolerance_factor, tolerances, wrong
from ringattn_conformance.cases import DTYPES, NAMED, Case, Inputs
from ringattn_conformance.outcomes import agrees, declared, owed, supports
from ringattn_conformance.ranks import Placed, Placement, place, run

NEEDS = frozenset({Feature.GRADIENTS})
ROUNDED = Case("rms", batch=1, q_length=768, kv_length=768, head_dim=16, value_dim=16, dtype="bfloat16", causal=True)
RMS_GROWTH = 1.1
RMS_OF_ROUNDING = 1.8
"""The largest error on one device, by that of the exact result rounded to bfloat16. It is 1.6 where probabilities and
derivatives of the scores are rounded before they are multiplied, and 2 or more in `dk` and `dv` where the products
of six tiles are summed in bfloat16."""
POISONED = Case("poisoned", lse=True, causal=True, window=(11, 0), segments="packed", heads=4, kv_heads=2)
POISONS = {"nan": np.nan, "inf": np.inf}
IN_PADDING = {
    "q": (np.nan, 3e38),
    "k": (np.inf, 3e38),
    "v": (np.nan, 3e38),
    "dout": (np.nan, -3e38),
    "dlse": (np.nan, 3e38),
}
"""What every other token of the padding holds, and what the rest of it holds."""
LOWEST = float(np.finfo(np.float32).min)
BIASES = (0.0, -1e6, -1e7, -1e9, LOWEST, -np.inf)
"""The bias of a row that has the same bias for every key; the rows take turns."""
HUGE: dict[str, tuple[int, dict[str, Any]]] = {
    "rows-ring1": (1, {"bias": "T"}),
    "rows-ring2": (2, {"bias": "T", "heads": 4, "dtype": "bfloat16"}),
    "rows-ring8": (8, {"bias": "T"}),
    "keys-ring2": (2, {"bias": "B"}),
    "sinks-ring2": (2, {"bias": "T", "sinks": "head"}),
}
SPOT = (1, 20, 1, 3)
"""Batch row, token, head and component of the one non-finite value."""


def _exact(answer: oracle.Answer) -> dict[str, np.ndarray]:
    return {"out": answer.out, **answer.gradients}


def _rms(got: dict[str, np.ndarray], answer: oracle.Answer) -> dict[str, float]:
    wanted = _exact(answer)
    return {name: float(np.sqrt(np.mean((x.astype(np.float64) - wanted[name]) ** 2))) for name, x in got.items()}


@tiers.core
def test_the_error_of_a_bfloat16_ring_of_eight_is_that_of_one_device(ringattn_backend: str):
    with owed(ringattn_backend, ROUNDED.needs | NEEDS) as right:
        results = {ring: run(place(ROUNDED, Placement(ring), ringattn_backend)) for ring in (1, 8)}
        if right:
            answer = ROUNDED.answer
            rounded = {name: x.astype(DTYPES[ROUNDED.dtype]) for name, x in _exact(answer).items()}
            least, one, eight = (_rms(got, answer) for got in (rounded, results[1], results[8]))
            # Two roundings of equal size, independent of each other.
            twice = 2**0.5 if tolerance_factor.half_partials else 1.0
            faults = [
                *_beyond(one, least, RMS_OF_ROUNDING * twice, "on one device", "of the exact result in bfloat16"),
                *_beyond(eight, one, RMS_GROWTH * twice, "on 8 devices", "on one"),
            ]
            wrong.fail_if(faults, "bfloat16 ring")


def _beyond(errors: dict[str, float], least: dict[str, float], most: float, where: str, of: str) -> list[str]:
    return [
        f"{name}: RMS error {error:.3g} {where}, {least[name]:.3g} {of}: "
        f"{error / least[name]:.3f} times, at most {most:.2g} allowed"
        for name, error in errors.items()
        if error > most * least[name]
    ]


def _of_one_sign(placed: Placed, operand: str) -> Placed:
    """What the bad value is multiplied with is positive, so that an infinity makes scores of +inf, never of -inf."""
    other = {"q": "k", "k": "q"}.get(operand)
    if other is None:
        return placed
    x = np.array(getattr(placed.inputs.problem, other))
    x[..., SPOT[-1]] = np.abs(x[..., SPOT[-1]])
    return placed.changed(**{other: x})


def _poisoned(placed: Placed, operand: str, value: float) -> Placed:
    x = np.array(getattr(placed.inputs.problem, operand))
    x[SPOT] = value
    return placed.changed(**{operand: x})


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


@tiers.mark(tiers.CORE, "k-nan")
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_a_non_finite_value_reaches_every_row_that_sees_it(ringattn_backend: str, operand: str, poison: str):
    """Rows that see it are non-finite, forward and backward, and so is dk of the keys that such rows see.

    It may reach others too, but what is finite is right. dv may stay finite, and for a value the lse too.
    """
    case = declared(ringattn_backend, POISONED)
    layout = "zigzag" if operand == "k" and supports(ringattn_backend, Feature.ZIGZAG) else "contiguous"
    clean = _of_one_sign(place(case, Placement(2, layout), ringattn_backend), operand)
    placed = _poisoned(clean, operand, POISONS[poison])
    with owed(ringattn_backend, case.needs | placed.placement.needs | NEEDS) as right:
        got = run(placed)
        if right:
            rows, keys = _rows_that_see(case, clean.inputs, operand)
            assert rows.any() and not rows.all()
            dout = np.where(rows[..., None], 0, clean.inputs.dout)
            dlse = None if clean.inputs.dlse is None else np.where(np.swapaxes(rows, 1, 2), 0, clean.inputs.dlse)
            answer = oracle.attend(clean.inputs.problem, dout, dlse)
            bad = {"out": rows, "dq": rows, "lse": np.swapaxes(rows, 1, 2), "dk": keys, "dv": keys}
            exempt = ("lse", "dv") if operand == "v" else ("dv",)  # exp(s - inf) is 0
            faults = [fault for name, x in got.items() for fault in _hidden(name, x, bad[name], answer, name in exempt)]
            wrong.fail_if(faults, f"{poison} in {operand} on {placed.placement}")


def _first(wrong: np.ndarray) -> list[int]:
    return np.argwhere(wrong)[0].tolist()


def _hidden(name: str, got: np.ndarray, bad: np.ndarray, answer: oracle.Answer, exempt: bool) -> list[str]:
    """The rows of `bad` that are finite, and the other elements that are finite and wrong."""
    want = {"out": answer.out, "lse": answer.lse, **answer.gradients}[name]
    hidden = bad & np.isfinite(got).reshape(*bad.shape, -1).all(-1) & ~np.array(exempt)
    faults = [f"{name}: {hidden.sum()} rows hide it, the first at {_first(hidden)}"] if hidden.any() else []
    left_out = bad.reshape(*bad.shape, *[1] * (got.ndim - bad.ndim)) | ~np.isfinite(got)
    rest = np.where(left_out, 0, got), np.where(left_out, 0, want)
    tolerance = tolerances.allowed(name, "float32", want, answer.largest, answer.uncapped)
    return faults + wrong.difference(name, *rest, tolerance)


@tiers.core
@pytest.mark.parametrize("name", ["garbage", "garbage-bfloat16"])
def test_what_padding_holds_harms_nobody(ringattn_backend: str, name: str):
    """Half of the padding holds non-finite values, the other half huge ones; results are those of ordinary padding."""
    case = declared(ringattn_backend, NAMED[name], Feature.SEGMENT_IDS)
    placed = place(case, Placement(2), ringattn_backend)
    problem, inputs = placed.inputs.problem, placed.inputs
    assert problem.q_segments is not None
    padding = np.flatnonzero(problem.q_segments[0] < 0)
    given = {"q": problem.q, "k": problem.k, "v": problem.v, "dout": inputs.dout, "dlse": inputs.dlse}
    spoilt = {name: np.array(x) for name, x in given.items() if x is not None}
    for name, x in spoilt.items():
        by_token = np.moveaxis(x, 2 if name == "dlse" else 1, 0)
        by_token[padding[::2]], by_token[padding[1::2]] = IN_PADDING[name]
    cotangents = {name: spoilt.pop(name) for name in ("dout", "dlse") if name in spoilt}
    inputs = dataclasses.replace(placed.changed(**spoilt).inputs, **cotangents)
    agrees(dataclasses.replace(placed, inputs=inputs), gradients=True)


@tiers.mark(tiers.CORE, "rows-ring1", "rows-ring2", "rows-ring8")
@pytest.mark.parametrize("name", HUGE)
def test_rows_of_hugely_negative_scores_are_those_of_float32(ringattn_backend: str, name: str):
    """A row with a bias of -1e9, say, gives the softmax of its scores rounded to float32, as `jax.nn` does."""
    ring, options = HUGE[name]
    case = Case("hugely-negative", lse=True, causal=True, scale=0.125, **options)
    placed = _of_exact_scores(place(case, Placement(ring), ringattn_backend))
    with owed(ringattn_backend, case.needs | NEEDS) as right:
        got = run(placed)
        if right:
            inputs = placed.changed(float32_scores=True).inputs
            answer = dataclasses.replace(oracle.attend(inputs.problem, inputs.dout, inputs.dlse), largest=0.0)
            lse = got.pop("lse")
            faults = tolerances.against_oracle(got, answer, case.dtype)
            # Beyond 2^12 the lse that the caller gets is as float32 rounds it.
            off = np.abs(np.where(np.isneginf(lse), 0, lse) - np.where(np.isneginf(answer.lse), 0, answer.lse))
            wrong = (off > 2e-5 + 3e-7 * np.abs(answer.lse)) | (np.isneginf(lse) != np.isneginf(answer.lse))
            faults += [f"lse: {wrong.sum()} rows wrong, the first at {_first(wrong)}"] if wrong.any() else []
            wrong.fail_if(faults, f"{name}: biases {BIASES} by turns")


def _of_exact_scores(placed: Placed) -> Placed:
    """Scores are odd multiples of 1/8 below 2, exact in float32, and no sum with a bias lies between two floats."""
    problem, draw = placed.inputs.problem, np.random.default_rng(0)
    q = 2 * draw.integers(-1, 2, problem.q.shape).astype(problem.q.dtype)
    k = draw.integers(-1, 2, problem.k.shape).astype(problem.k.dtype)
    q[..., 0], k[..., 0] = (draw.choice([-1.0, 1.0], x.shape[:-1]) for x in (q, k))
    bias = np.array(problem.bias)
    by_turns = np.array(BIASES, np.float32).astype(bias.dtype)[np.arange(bias.shape[2]) % len(BIASES)]
    bias[:] = by_turns[None, None, :, None] if bias.shape[2] > 1 else -1e9
    if bias.shape[2] == 1:
        bias[0] = LOWEST
    else:
        bias[:, :, 7::12, 3] = 0.5  # one key of a row of -1e6 is as usual
    return placed.changed(q=q, k=k, bias=bias)


@tiers.core
def test_products_of_float32_are_exact_whatever_the_default_precision(ringattn_backend: str):
    case = Case("exact", head_dim=32, value_dim=32)
    placed = place(case, Placement(2, emulated=True), ringattn_backend)
    with jax.default_matmul_precision("bfloat16"):
        agrees(placed)


def test_with_numbers_of_64_bits_enabled_nothing_changes(ringattn_backend: str):
    """Several tiles, grouped heads and a bias: loop counters may have 64 bits where indices have 32."""
    case = Case(
        "wide", q_length=400, kv_length=400, head_dim=8, value_dim=8, heads=4, kv_heads=1, bias="T", causal=True
    )
    with jax.enable_x64(True):
        agrees(place(case, Placement(2), ringattn_backend))
