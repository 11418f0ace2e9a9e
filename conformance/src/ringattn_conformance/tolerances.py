# SPDX-License-Identifier: Apache-2.0
"""The largest error that a result may have, and the comparison with the oracle."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from . import wrong
from .cases import DTYPES, OPERANDS, Case
from .oracle import Answer

FORWARD: Final = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest absolute error of the output, the lse and `max_logits`."""
GRADIENTS: Final = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 2.5e-2}
"""Largest absolute error of a gradient, as a multiple of its largest element (taken as at least 0.1)."""
HALF_PARTIALS: Final = 2.0
"""The factor of half-precision tolerances for a backend with `half_partials`, whose results are rounded twice."""
LOWER_PRECISION: Final = "bfloat16"
"""The dtype whose tolerances apply to calls with a `precision` below "highest"."""
SAFE_SCORE: Final = 32.0
"""The tolerances above hold for scores up to this magnitude, and grow in proportion beyond it."""
FLOAT32: Final = ("lse", "max_logits")
"""The results that are float32, whatever the dtype of the inputs."""
PAIRS: Final = (("q_length", "kv_length"), ("heads", "kv_heads"), ("head_dim", "value_dim"))
"""Sizes that a failure tells together where they differ, even if one has its default."""

factor = 1.0
"""The multiplier of every tolerance in this process, from the option `tolerance-factor`."""
half_partials = False
"""Whether the backend under test declares `half_partials`."""


def allowed(quantity: str, dtype: str, want: np.ndarray, largest: float, uncapped: float = 0.0) -> float:
    """The largest absolute error that the specification allows, times the `factor` of this run.

    In float32 the largest score before the soft cap (`uncapped`) counts too: a score near zero may be a sum of products
    that large, so it has their rounding error, and the cap does not shrink an error near zero. In half precision this
    error is far below the tolerance, because products are summed in float32.
    """
    score = max(largest, uncapped) if dtype == "float32" else largest
    growth = factor * max(1.0, score / SAFE_SCORE)
    if half_partials and dtype != "float32":
        growth *= HALF_PARTIALS
    if not quantity.startswith("d"):
        return FORWARD[dtype] * growth
    size = np.max(np.abs(want), where=np.isfinite(want), initial=0.0)
    return GRADIENTS[dtype] * growth * max(0.1, float(size))


def check(got: Mapping[str, Any], answer: Answer, case: Case, where: str = "") -> None:
    """Raises `Wrong` unless every result in `got` is within tolerance of the oracle's and has the right dtype."""
    faults = against_oracle(got, answer, case)
    for name, x in got.items():
        faults += _dtype_fault(name, np.asarray(x).dtype, case)
    faults += rounded_to_half({name: got[name] for name in FLOAT32 if name in got}, answer)
    wrong.fail_if(faults, told(case, where), got)


def told(case: Case, where: str) -> str:
    """The first line of a failure: the case, its options that differ from the defaults, and pairs of unequal sizes."""
    options = dict(case.changes)
    for pair in PAIRS:
        sizes = {name: getattr(case, name) for name in pair}
        options |= sizes if len({*sizes.values()}) > 1 else {}
    differ = ", ".join(f"{option}={x!r}" for option, x in options.items())
    return f"case {case.name!r}{where and ' ' + where}" + (f": {differ}" if differ else "")


def against_oracle(got: Mapping[str, Any], answer: Answer, case: Case) -> list[str]:
    """A line for each result in `got` that is beyond its tolerance.

    The tolerance of the output is multiplied by the case's `value_gain`. A result whose own dtype is half
    precision, such as the gradient of a bfloat16 bias beside float32 inputs, has the tolerance of that dtype.
    """
    dtype = case.dtype if case.precision in (None, "highest") else LOWER_PRECISION
    wanted = _wanted(answer)
    faults = []
    for name, x in got.items():
        dtypes = {dtype, str(np.asarray(x).dtype)} & DTYPES.keys()
        tolerance = max(allowed(name, one, wanted[name], answer.largest, answer.uncapped) for one in dtypes)
        tolerance = tolerance * (case.value_gain if name == "out" else 1.0) + answer.slack.get(name, 0.0)
        faults += wrong.difference(name, x, wanted[name], tolerance, answer.empty)
    return faults


def _wanted(answer: Answer) -> dict[str, Any]:
    """The oracle's results by name."""
    return {"out": answer.out, "lse": answer.lse, "max_logits": answer.max_logits, **answer.gradients}


def rounded_to_half(got: Mapping[str, Any], answer: Answer) -> list[str]:
    """A line of the failure message for each result that a kernel has rounded to half precision.

    That is so if half precision represents all its values, but fewer than half of the oracle's. The gradient of a bias
    that is not broadcast is not judged: each of its entries is the derivative of one score, which kernels hold in the
    dtype of the inputs.
    """
    wanted = _wanted(answer)
    faults = []
    for name, x in got.items():
        if name == "dbias" and wanted[name].size == answer.lse.size * wanted[name].shape[-1]:
            continue
        want = wanted[name][np.isfinite(wanted[name]) & (wanted[name] != 0)]
        for half in ("float16", "bfloat16"):
            if (_narrowed(x, half) == x).all() and want.size and np.mean(_narrowed(want, half) != want) > 0.5:
                faults.append(f"{name}: every value is rounded to {half}, want float32")
    return faults


def _narrowed(x: Any, half: str) -> np.ndarray:
    """`x` rounded to half precision."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(DTYPES[half]).astype(np.float32)


def _dtype_fault(name: str, dtype: np.dtype, case: Case) -> list[str]:
    operand = next((x for x, gradient in OPERANDS.items() if gradient == name), None)
    if operand is not None:
        want = getattr(case.inputs.problem, operand).dtype
    else:
        want = np.dtype(np.float32 if name in FLOAT32 else DTYPES[case.dtype])
    return [] if dtype == want else [f"{name}: got dtype {dtype}, want {want}"]
