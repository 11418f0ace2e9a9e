# SPDX-License-Identifier: Apache-2.0
"""The largest error that a result may have, and the message about one that exceeds it: by how much, and where."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from .cases import DTYPES, OF_GRADIENTS, Case
from .oracle import Answer

FORWARD: Final = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest absolute error of the output, the lse and `max_logits`."""
GRADIENTS: Final = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 2.5e-2}
"""Largest absolute error of a gradient, as a multiple of its largest element (taken as at least 0.1)."""
SUBNORMAL: Final = 2.0**-22
"""Four times the spacing of float16's subnormal numbers; every tolerance in half precision allows this error."""
ROW: Final = (1.0, 2.0)
"""The tolerance of a row, as a multiple of its size times the tolerance of the whole result: for outputs, and for
gradients, which have the errors of two factors."""
HALF_PARTIALS: Final = 2.0
"""Multiplies the tolerances of float16 and bfloat16 for a backend that declares `half_partials`.

Its kernel rounds the results of each block to the dtype of the inputs, so the sum over blocks is rounded a second time.
"""
LOWER_PRECISION: Final = "bfloat16"
"""The dtype whose tolerances apply to calls of float32 inputs with a `precision` below "highest"."""
TF32_SLACK: Final = 2.0**13
"""Multiplies `Answer.slack` for such calls: the rounding of TF32 is 2^-10, that of float32 2^-23."""
NEAR_HALF: Final = 8 * float(np.finfo(np.float32).eps)
"""How near to a number of half precision, as a part of itself, a float32 result may be by the rounding of float32: a
largest score that a soft cap bounds may be the cap itself."""
SAFE_SCORE: Final = 32.0
"""The tolerances above hold for scores up to this magnitude, and grow in proportion beyond it."""
FLOAT32: Final = ("lse", "max_logits")
"""The results that are float32, whatever the dtype of the inputs."""
PAIRS: Final = (("q_length", "kv_length"), ("heads", "kv_heads"), ("head_dim", "value_dim"))
"""Sizes that a failure tells together where they differ, even if one has its default."""
AXES: Final = {
    "out": ("batch row", "query", "head", "value component"),
    "lse": ("batch row", "head", "query"),
    "max_logits": ("head",),
    "dq": ("batch row", "query", "head", "component"),
    "dk": ("batch row", "key", "key head", "component"),
    "dv": ("batch row", "key", "key head", "value component"),
    "dbias": ("batch row", "head", "query", "key"),
    "dslopes": ("head",),
}
"""What each axis of a result counts, in the words of failure messages."""
LISTED: Final = 4
"""How many indices of an axis a message lists one by one; of more it tells a pattern or the range."""

factor = 1.0
"""The multiplier of every tolerance in this process, from the option `tolerance-factor`."""
half_partials = False
"""Whether the backend under test declares `half_partials`."""


def allowed(quantity: str, dtype: str, want: np.ndarray, largest: float, uncapped: float = 0.0) -> float:
    """The largest absolute error that the specification allows for a result, times the `factor` of this run.

    `quantity` names the result, "d..." a gradient, and `want` is the oracle's. `largest` is the largest magnitude of a
    score that any query sees, sinks included (`Answer.largest`); beyond `SAFE_SCORE` the tolerance grows with it.
    In float32 the largest score before the soft cap (`uncapped`) counts too: a score near zero may be a sum of products
    that large, so it has their rounding error, and the cap does not shrink an error near zero. In half precision this
    error is far below the tolerance, because products are exact and summed in float32.
    """
    score = max(largest, uncapped) if dtype == "float32" else largest
    growth = factor * max(1.0, score / SAFE_SCORE)
    if half_partials and dtype != "float32":
        growth *= HALF_PARTIALS
    if not quantity.startswith("d"):
        return FORWARD[dtype] * growth
    size = np.max(np.abs(want), where=np.isfinite(want), initial=0.0)
    return GRADIENTS[dtype] * growth * max(0.1, float(size))


def allowed_by_row(quantity: str, dtype: str, answer: Answer, tolerance: float) -> float | np.ndarray:
    """The largest absolute error of each row of a result, where `tolerance` is that of the whole result.

    In half precision a small row has a small tolerance: that of a row of its size. Without that, an error of the whole
    output would pass where a query sees thousands of keys.
    """
    size = answer.sizes.get(quantity)
    if size is None or dtype == "float32":
        return tolerance
    want = answer.by_name[quantity]
    size = np.maximum(size, np.abs(want).max(-1, keepdims=True))  # by which the result itself is rounded
    whole = 1.0 if not quantity.startswith("d") else max(0.1, float(np.abs(want).max(initial=0.0)))
    return tolerance * np.minimum(1.0, ROW[quantity.startswith("d")] * size / whole) + SUBNORMAL


def check(got: Mapping[str, Any], answer: Answer, case: Case, where: str = "") -> None:
    """Raises `Wrong` unless every result in `got` is within tolerance of the oracle's and has the right dtype."""
    faults = against_oracle(got, answer, case)
    for name, x in got.items():
        own = np.float32 if name in FLOAT32 else DTYPES[case.dtype]
        want = getattr(case.inputs.problem, OF_GRADIENTS[name]).dtype if name in OF_GRADIENTS else own
        faults += [f"{name}: got dtype {x.dtype}, want {np.dtype(want)}"] if x.dtype != want else []
    faults += rounded_to_half({name: got[name] for name in FLOAT32 if name in got}, answer)
    fail_if(faults, told(case, where), got)


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
    With a lower `precision`, products of float32 inputs are not exact, so scores before the soft cap count. Products
    of half precision are exact at every `precision`.
    """
    lower = case.dtype == "float32" and case.precision not in (None, "highest")
    dtype = LOWER_PRECISION if lower else case.dtype
    largest = max(answer.largest, answer.uncapped) if lower else answer.largest
    wanted, faults = answer.by_name, []
    for name, x in got.items():
        dtypes = {dtype, str(np.asarray(x).dtype)} & DTYPES.keys()
        tolerance = max(allowed(name, one, wanted[name], largest, answer.uncapped) for one in dtypes)
        tolerance = allowed_by_row(name, dtype, answer, tolerance)
        slack = answer.slack.get(name, 0.0) * (TF32_SLACK if lower else 1.0)
        tolerance = tolerance * (case.value_gain if name == "out" else 1.0) + slack
        faults += difference(name, x, wanted[name], tolerance, answer.empty)
    return faults


def rounded_to_half(got: Mapping[str, Any], answer: Answer) -> list[str]:
    """A line of the failure message for each result that a kernel has rounded to half precision.

    That is so if all its values are numbers of half precision, and more than half of the oracle's are farther than
    `NEAR_HALF` from such a number. The gradient of a bias that is not broadcast is not judged: each of its entries is
    the derivative of one score, which kernels hold in the dtype of the inputs.
    """
    wanted, faults = answer.by_name, []
    for name, x in got.items():
        if name == "dbias" and wanted[name].size == answer.lse.size * wanted[name].shape[-1]:
            continue
        want = wanted[name][np.isfinite(wanted[name]) & (wanted[name] != 0)]
        for half in ("float16", "bfloat16"):
            not_half = np.abs(_narrowed(want, half) - want) > NEAR_HALF * np.abs(want)
            if (_narrowed(x, half) == x).all() and want.size and np.mean(not_half) > 0.5:
                faults.append(f"{name}: every value is rounded to {half}, want float32")
    return faults


def _narrowed(x: Any, half: str) -> np.ndarray:
    """`x` rounded to half precision."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(DTYPES[half]).astype(np.float32)


class Wrong(AssertionError):
    """A backend gives a wrong result. The message says all: the traceback ends in the suite, not in the backend."""


def fail_if(faults: Iterable[str], subject: str, compared: Iterable[str] = ()) -> None:
    """Raises `Wrong` with all faults if there are any, and names the results in `compared` that have none."""
    lines = list(faults)
    if lines:
        right = [name for name in compared if not any(line.startswith(f"{name}:") for line in lines)]
        lines += [f"right: {', '.join(right)}"] if right else []
        raise Wrong("\n  ".join([subject, *lines]))


def difference(
    name: str, got: Any, want: np.ndarray, tolerance: float | np.ndarray, empty: np.ndarray | None = None
) -> list[str]:
    """One line on the differences beyond the tolerance, or none. NaN and infinities must be in the same places.

    The tolerance is one number, or an array that broadcasts to the result. `empty[B, N, T]` marks rows that see no key:
    the line says so if all wrong elements, or all NaN, are in such rows.
    """
    got = np.asarray(got)
    if got.shape != want.shape:
        return [f"{name}: got shape {got.shape}, want {want.shape}"]
    seen = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where((seen == want) | (np.isnan(seen) & np.isnan(want)), 0.0, np.abs(seen - want))
    error = np.where(np.isnan(error), np.inf, error)
    beyond = error > tolerance
    if not beyond.any():
        return []
    limit = np.broadcast_to(tolerance, error.shape)
    worst = np.unravel_index(int(np.argmax(error / np.maximum(limit, np.finfo(np.float64).tiny))), error.shape)
    return [
        f"{name}: worst at [{', '.join(map(str, worst))}]: got {seen[worst]:.8g}, want {want[worst]:.8g}, "
        f"error {error[worst]:.3g}, tolerance {limit[worst]:.3g}; {beyond.sum()} of {error.size} elements beyond it"
        f"{places(name, beyond)}{_zeros(seen, beyond)}{_empty_and_nan(name, beyond, np.isnan(seen) & beyond, empty)}"
    ]


def _zeros(got: np.ndarray, beyond: np.ndarray) -> str:
    """Says where a result is 0 that should not be."""
    if not got.any():
        return "; all of it is 0"
    return "" if got[beyond].any() else "; all wrong elements are 0"


def places(name: str, wrong: np.ndarray) -> str:
    """The indices of wrong elements along each axis, in words; an axis is left out if all its indices have some."""
    found = []
    for number, axis in enumerate(AXES.get(name, ())[: wrong.ndim]):
        at = np.flatnonzero(wrong.any(tuple(other for other in range(wrong.ndim) if other != number)))
        if at.size < wrong.shape[number]:
            found.append(_pattern(axis, at, wrong.shape[number]))
    return ": " + ", ".join(found) if found else ""


def _pattern(axis: str, at: np.ndarray, length: int) -> str:
    """The indices `at` of an axis in words, such as "queries 37..", "every 64th key from 63 on", "head 3"."""
    first, last = int(at[0]), int(at[-1])
    steps = set(np.diff(at).tolist())
    many = "queries" if axis == "query" else f"{axis}s"
    if at.size == 1:
        return f"{axis} {first}" + (f" (the last of {length})" if first == length - 1 > 0 else "")
    if steps == {1}:
        return f"{many} {first}.." + ("" if last == length - 1 else str(last))
    if at.size <= LISTED:
        return f"{many} {', '.join(map(str, at))}"
    if len(steps) == 1:
        return f"every {_ordinal(steps.pop())} {axis} from {first} on"
    return f"{at.size} of {length} {many} from {first} to {last}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _empty_and_nan(name: str, beyond: np.ndarray, nan: np.ndarray, empty: np.ndarray | None) -> str:
    """Whether all wrong elements, or else all NaN, are in rows that see no key, and how many NaN there are."""
    rows = None if empty is None else empty if name == "lse" else np.swapaxes(empty, 1, 2)[..., None]

    def in_empty(wrong: np.ndarray) -> bool:
        return name in ("out", "lse", "dq") and rows is not None and not (wrong & ~rows).any()

    count = f"; {int(nan.sum())} NaN" if nan.any() else ""
    if in_empty(beyond):
        return "; all in rows that see no key" + count
    return count + (", all in rows that see no key" if count and in_empty(nan) else "")
