# SPDX-License-Identifier: Apache-2.0
"""How far a result may be from the oracle, and what a failure says."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from .cases import DTYPES, OPERANDS, Case, Inputs
from .oracle import Answer

FORWARD: Final = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest absolute error of the output and of the lse."""
GRADIENTS: Final = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 2.5e-2}
"""Largest absolute error of a gradient, relative to its largest element or 0.1."""
SAFE_SCORE: Final = 32.0
"""Scores up to this keep the tolerances above; beyond, these grow in proportion."""


def allowed(quantity: str, dtype: str, want: np.ndarray, largest: float) -> float:
    """The largest absolute error that the specification allows."""
    growth = max(1.0, largest / SAFE_SCORE)
    if not quantity.startswith("d"):
        return FORWARD[dtype] * growth
    size = np.max(np.abs(want), where=np.isfinite(want), initial=0.0)
    return GRADIENTS[dtype] * growth * max(0.1, float(size))


def check(got: Mapping[str, Any], answer: Answer, case: Case, inputs: Inputs, where: str = "") -> None:
    """Every quantity in `got` is what the oracle says, in the dtype that the specification says."""
    wanted = {"out": answer.out, "lse": answer.lse, **answer.gradients}
    faults = []
    for name, x in got.items():
        fault = difference(name, x, wanted[name], allowed(name, case.dtype, wanted[name], answer.largest))
        faults += [fault] if fault else _dtype_fault(name, np.asarray(x).dtype, case, inputs)
    fail_if(faults, f"case {case.name!r}{where and ' ' + where}")


def difference(name: str, got: Any, want: np.ndarray, tolerance: float) -> str | None:
    """Where and by how much `got` misses `want`; NaN and infinities must be equal, place for place."""
    got = np.asarray(got)
    if got.shape != want.shape:
        return f"{name}: got shape {got.shape}, want {want.shape}"
    seen = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where((seen == want) | (np.isnan(seen) & np.isnan(want)), 0.0, np.abs(seen - want))
    error = np.where(np.isnan(error), np.inf, error)
    beyond = int((error > tolerance).sum())
    if not beyond:
        return None
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    return (
        f"{name}: worst at [{', '.join(map(str, worst))}]: got {seen[worst]:.8g}, want {want[worst]:.8g}, "
        f"error {error[worst]:.3g}, tolerance {tolerance:.3g}; {beyond} of {error.size} elements beyond it, "
        f"{int(np.isnan(seen).sum())} NaN"
    )


def fail_if(faults: list[str], subject: str) -> None:
    """Raises one failure that lists all faults; the plugin adds the line that runs the test alone."""
    if faults:
        raise AssertionError(subject + "".join(f"\n  {fault}" for fault in faults))


def _dtype_fault(name: str, dtype: np.dtype, case: Case, inputs: Inputs) -> list[str]:
    operand = next((x for x, gradient in OPERANDS.items() if gradient == name), None)
    if operand is not None:
        want = getattr(inputs.problem, operand).dtype
    else:
        want = np.dtype(np.float32 if name == "lse" else DTYPES[case.dtype])
    return [] if dtype == want else [f"{name}: got dtype {dtype}, want {want}"]
