# SPDX-License-Identifier: Apache-2.0
"""Rounding and extreme values: no error grows with the ring, NaN is not hidden, and a second run has the same bits."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import comparison, oracle, tiers
from ringattn_conformance.cases import DTYPES, NAMED, Case, Inputs
from ringattn_conformance.outcomes import agrees, declared, owed, supports
from ringattn_conformance.ranks import Placed, Placement, place, run, with_gradients

NEEDS = frozenset({Feature.GRADIENTS})
ROUNDED = Case("rms", batch=1, q_length=768, kv_length=768, head_dim=16, value_dim=16, causal=True)
IN_ONE_BLOCK: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3, "lse": True},
    "group": {"heads": 16, "kv_heads": 1, "sinks": "head"},
    "soft_cap": {"soft_cap": 3.0, "gain": 3.0, "heads": 3, "kv_heads": 1, "batch": 2},
}
"""Options of calls on one device, in which an error of the whole result, or of a sum over heads, shows in the RMS."""
RMS_GROWTH = 1.1
RMS_OF_ROUNDING = 1.8
"""The largest RMS error on one device, as a multiple of the RMS error of the exact result in half precision. A kernel
that rounds probabilities and score derivatives before it multiplies them has 1.6; one that sums the products of six
tiles in half precision has 2 or more in `dk` and `dv`."""
POISONED = Case(
    "poisoned", q_length=160, kv_length=160, heads=4, kv_heads=2, causal=True, window=(11, 0), segments="packed",
    lse=True,
)  # fmt: skip
"""Longer than the tiles of interpreted kernels, because a kernel may treat long rows alone as finite."""
IN_PADDING = {
    "q": (1e3, -300.0),
    "k": (-1e3, 300.0),
    "v": (3e3, -1e3),
    "dout": (np.nan, -3e38),
    "dlse": (np.nan, 3e38),
}
"""By array: the value in every other padding token, and the value in the remaining padding tokens."""
LOWEST = float(np.finfo(np.float32).min)
FORBIDDING = (0.0, -2e5, -1e9, LOWEST, -np.inf)
LOW: dict[str, tuple[int, tuple[float, ...], dict[str, Any]]] = {
    "rows-ring1": (1, FORBIDDING, {"bias": "T"}),
    "rows-ring2": (2, FORBIDDING, {"bias": "T", "heads": 4, "dtype": "bfloat16"}),
    "rows-ring8": (8, FORBIDDING, {"bias": "T"}),
    "keys-ring2": (2, FORBIDDING, {"bias": "B"}),
    "sinks-ring2": (2, FORBIDDING, {"bias": "T", "sinks": "head"}),
    "allowed-ring2": (2, (0.0, -9e4, -2e5), {"bias": "T"}),
}
"""The ring size, the biases that rows take by turns (keys, if all rows share one bias), and the case's options."""
SPOT = (1, 20, 1, 3)
"""Batch row, token, head and component of the one non-finite value."""


def _rms(got: dict[str, np.ndarray], answer: oracle.Answer) -> dict[str, float]:
    wanted = answer.by_name
    return {name: float(np.sqrt(np.mean((x.astype(np.float64) - wanted[name]) ** 2))) for name, x in got.items()}


@tiers.mark(tiers.CORE, "bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_error_of_a_ring_of_eight_in_half_precision_is_that_of_one_device(ringattn_backend: str, dtype: str):
    case = dataclasses.replace(ROUNDED, dtype=dtype)
    with owed(ringattn_backend, case.needs | NEEDS) as right:
        rings = {ring: place(case, Placement(ring), ringattn_backend) for ring in (1, 8)}
        results = {ring: run(placed) for ring, placed in rings.items()}
        if right:
            answer = rings[1].case.answer
            rounded = {name: answer.by_name[name].astype(DTYPES[dtype]) for name in results[1]}
            least, one, eight = (_rms(got, answer) for got in (rounded, results[1], results[8]))
            # Two roundings of equal size, independent of each other.
            twice = 2**0.5 if comparison.half_partials else 1.0
            faults = [
                *_beyond(one, least, RMS_OF_ROUNDING * twice, "on one device", f"of the exact result in {dtype}"),
                *_beyond(eight, one, RMS_GROWTH * twice, "on 8 devices", "on one"),
            ]
            comparison.fail_if(faults, f"{dtype} ring")


@tiers.mark(tiers.CORE, "dropout-float16", "group-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", IN_ONE_BLOCK)
def test_the_error_in_half_precision_is_that_of_rounding(ringattn_backend: str, name: str, dtype: str):
    """The RMS error of each result is that of few roundings: none of its terms is summed in half precision."""
    case = Case(f"rms-{name}", q_length=256, kv_length=256, head_dim=16, value_dim=16, causal=True, dtype=dtype)
    placed = place(dataclasses.replace(case, **IN_ONE_BLOCK[name]), Placement(1), ringattn_backend)
    with owed(ringattn_backend, placed.case.needs | NEEDS) as right:
        results = run(placed)
        if right:
            answer = placed.case.answer
            got = {name: x for name, x in results.items() if x.dtype == DTYPES[dtype]}
            rounded = {name: answer.by_name[name].astype(DTYPES[dtype]) for name in got}
            twice = 2**0.5 if comparison.half_partials else 1.0
            errors, least = _rms(got, answer), _rms(rounded, answer)
            faults = _beyond(errors, least, RMS_OF_ROUNDING * twice, "on one device", f"of the exact result in {dtype}")
            faults = [f"{fault}{_most_wrong(fault.partition(':')[0], got, answer)}" for fault in faults]
            comparison.fail_if(faults, comparison.told(placed.case, f"on {placed.placement}"), got)


def _most_wrong(name: str, got: dict[str, np.ndarray], answer: oracle.Answer) -> str:
    """The factor that brings a result nearest to the oracle's, and the places of its largest errors."""
    x, want = got[name].astype(np.float64), answer.by_name[name]
    factor = float((x * want).sum() / max((x * x).sum(), np.finfo(np.float64).tiny))
    error = np.abs(x - want)
    where = comparison.places(name, error >= np.quantile(error, 0.99))
    return f"; the best factor to the right result is {factor:.5f}; the largest errors are in{where or ' all places'}"


def _beyond(errors: dict[str, float], least: dict[str, float], most: float, where: str, of: str) -> list[str]:
    return [
        f"{name}: RMS error {error:.3g} {where}, {least[name]:.3g} {of}: "
        f"{error / least[name]:.3f} times, at most {most:.2g} allowed"
        for name, error in errors.items()
        if error > most * least[name]
    ]


def _of_one_sign(placed: Placed, operand: str) -> Placed:
    """Makes what a bad value in `q` or `k` is multiplied with positive, so that an infinity gives scores of +inf."""
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
    """`[B, T, N]`: the queries that hold the bad value or see its key; `[B, S, K]`: the keys that any of these sees."""
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
@pytest.mark.parametrize("poison", ["nan", "inf"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_a_non_finite_value_reaches_every_row_that_sees_it(ringattn_backend: str, operand: str, poison: str):
    """A query that holds or sees the value has non-finite out, lse and dq; a key that it sees has a non-finite dk.

    A query that sees no key is not such a query. dv need not be non-finite, nor lse if the value is in `v`. Other
    elements may be non-finite too, but all finite ones are right.
    """
    case = declared(ringattn_backend, POISONED)
    layout = "zigzag" if operand == "k" and supports(ringattn_backend, Feature.ZIGZAG) else "contiguous"
    clean = _of_one_sign(place(case, Placement(2, layout), ringattn_backend), operand)
    placed = _poisoned(clean, operand, float(poison))
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
            faults = [
                fault
                for name, x in got.items()
                for fault in _hidden(name, x, case.dtype, bad[name], answer, name in exempt)
            ]
            comparison.fail_if(faults, f"{poison} in {operand} on {placed.placement}")


def _hidden(name: str, got: np.ndarray, dtype: str, bad: np.ndarray, answer: oracle.Answer, exempt: bool) -> list[str]:
    """Faults: rows of `bad` that are finite, unless `exempt`, and finite elements elsewhere that are wrong."""
    want = answer.by_name[name]
    hidden = bad & np.isfinite(got).reshape(*bad.shape, -1).all(-1) & ~np.array(exempt)
    at = np.argwhere(hidden).tolist()
    faults = [f"{name}: {len(at)} rows hide it, the first at {at[0]}"] if at else []
    left_out = bad.reshape(*bad.shape, *[1] * (got.ndim - bad.ndim)) | ~np.isfinite(got)
    rest = np.where(left_out, 0, got), np.where(left_out, 0, want)
    tolerance = comparison.allowed(name, dtype, want, answer.largest, answer.uncapped)
    return faults + comparison.difference(name, *rest, tolerance)


@tiers.core
@pytest.mark.parametrize("name", ["garbage", "garbage-bfloat16"])
def test_what_padding_holds_harms_nobody(ringattn_backend: str, name: str):
    """Padding holds large numbers, in half of its cotangents NaN; results are as with ordinary padding."""
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


@tiers.mark(tiers.CORE, "rows-ring1", "rows-ring2", "rows-ring8", "allowed-ring2")
@pytest.mark.parametrize("name", LOW)
def test_a_bias_below_minus_100000_forbids_as_minus_infinity_does(ringattn_backend: str, name: str):
    """A row with all biases below -1e5 sees no key; a row with all biases at -9e4 sees its keys as usual."""
    ring, biases, options = LOW[name]
    case = Case("low-bias", lse=True, causal=True, **options)
    placed = place(case, Placement(ring), ringattn_backend)
    bias = np.array(placed.inputs.problem.bias)
    shared = bias.shape[2] == 1
    by_turns = np.array(biases, np.float32).astype(bias.dtype)[np.arange(bias.shape[3 if shared else 2]) % len(biases)]
    bias[:] = by_turns if shared else by_turns[:, None]
    if not shared:
        bias[:, :, 7::12, 3] = 0.5  # in some rows one key keeps an ordinary bias
    placed = placed.changed(bias=bias)
    agrees(placed, gradients=True, problem=placed.inputs.problem)


@tiers.core
def test_products_of_float32_are_exact_whatever_the_default_precision(ringattn_backend: str):
    case = Case("exact", head_dim=32, value_dim=32)
    placed = place(case, Placement(2, emulated=True), ringattn_backend)
    with jax.default_matmul_precision("bfloat16"):
        agrees(placed)


WIDE: dict[str, dict[str, Any]] = {
    "tiles": {"q_length": 400, "kv_length": 400, "heads": 4, "kv_heads": 1, "bias": "T"},
    "dropout": {"dropout": 0.3, "slopes": 1.0, "segments": "packed"},
    "masks": {"window": (11, 3), "ranges": "gaps", "builder": "thirds", "soft_cap": 2.0, "sinks": "each", "lse": True},
}
"""Options of calls with numbers of 64 bits: several tiles, grouped heads and a bias, where loop counters become 64-bit
but indices stay 32-bit; random bits, distances and ids; bounds, bits and sinks."""


@tiers.mark(tiers.CORE, "dropout")
@pytest.mark.parametrize("name", WIDE)
def test_with_numbers_of_64_bits_enabled_nothing_changes(ringattn_backend: str, name: str):
    case = declared(ringattn_backend, Case(f"wide-{name}", causal=True, **WIDE[name]))
    with jax.enable_x64(True):
        agrees(place(case, Placement(2), ringattn_backend))


@tiers.mark(tiers.CORE, "long-causal")
@pytest.mark.parametrize("name", ["everything", "long-causal", "causal-bfloat16"])
def test_a_repeated_run_gives_the_same_bits(ringattn_backend: str, name: str):
    case = NAMED[name]
    placed = place(case, Placement(2), ringattn_backend)
    with owed(ringattn_backend, case.needs | {Feature.GRADIENTS}) as right:
        program = jax.jit(with_gradients(placed.everywhere()))
        runs = [jax.tree.map(np.asarray, program(placed.operands, placed.fixed, placed.cotangents)) for _ in range(3)]
        if right:
            for again in runs[1:]:
                different = {
                    name: int((x.view(np.uint8) != again[name].view(np.uint8)).sum()) for name, x in runs[0].items()
                }
                assert not any(different.values()), f"bytes that differ: {different}"
