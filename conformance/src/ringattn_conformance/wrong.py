# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a result, in words: by how much, and in which rows, heads and keys."""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

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


class Wrong(AssertionError):
    """A backend gives a wrong result. The message says all: the traceback ends in the suite, not in the backend."""


def fail_if(faults: Iterable[str], subject: str, compared: Iterable[str] = ()) -> None:
    """Raises `Wrong` with all faults if there are any, and names the results in `compared` that have none."""
    lines = list(faults)
    if lines:
        right = [name for name in compared if not any(line.startswith(f"{name}:") for line in lines)]
        lines += [f"right: {', '.join(right)}"] if right else []
        raise Wrong("\n  ".join([subject, *lines]))


def errors(seen: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Absolute error of each element; infinite if only one side is NaN, or an infinity is unlike the other side."""
    with np.errstate(invalid="ignore"):
        error = np.where((seen == want) | (np.isnan(seen) & np.isnan(want)), 0.0, np.abs(seen - want))
    return np.where(np.isnan(error), np.inf, error)


def difference(name: str, got: Any, want: np.ndarray, tolerance: float, empty: np.ndarray | None = None) -> list[str]:
    """One line on the differences beyond the tolerance, or none. NaN and infinities must be in the same places.

    `empty[B, N, T]` marks rows that see no key: the line says so if all wrong elements, or all NaN, are in such rows.
    """
    got = np.asarray(got)
    if got.shape != want.shape:
        return [f"{name}: got shape {got.shape}, want {want.shape}"]
    seen = got.astype(np.float64)
    error = errors(seen, want)
    beyond = error > tolerance
    if not beyond.any():
        return []
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    return [
        f"{name}: worst at [{', '.join(map(str, worst))}]: got {seen[worst]:.8g}, want {want[worst]:.8g}, "
        f"error {error[worst]:.3g}, tolerance {tolerance:.3g}; {int(beyond.sum())} of {error.size} elements beyond it"
        f"{places(name, beyond)}{_empty_and_nan(name, beyond, np.isnan(seen) & beyond, empty)}"
    ]


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
        return f"every {steps.pop()}th {axis} from {first} on"
    return f"{at.size} of {length} {many} from {first} to {last}"


def _empty_and_nan(name: str, beyond: np.ndarray, nan: np.ndarray, empty: np.ndarray | None) -> str:
    """Whether all wrong elements, or else all NaN, are in rows that see no key, and how many NaN there are."""
    rows = None if empty is None else empty if name == "lse" else np.swapaxes(empty, 1, 2)[..., None]

    def in_empty(wrong: np.ndarray) -> bool:
        return name in ("out", "lse", "dq") and rows is not None and not (wrong & ~rows).any()

    count = f"; {int(nan.sum())} NaN" if nan.any() else ""
    if in_empty(beyond):
        return "; all in rows that see no key" + count
    return count + (", all in rows that see no key" if count and in_empty(nan) else "")
