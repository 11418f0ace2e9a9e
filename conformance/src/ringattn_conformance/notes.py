# SPDX-License-Identifier: Apache-2.0
"""What a test records beside its outcome: the features that it needs, the rings it ran on, and its errors."""

from collections.abc import Iterable
from typing import Any, Final

_NOTES: Final[dict[str, Any]] = {"needed": set(), "rings": set(), "worst": {}}
"""What the current test has recorded. `worst` has, by dtype and result, the error that is the largest part of its
tolerance, and that tolerance."""


def needs(features: Iterable[Any]) -> None:
    """Records that the test needs these features."""
    _NOTES["needed"].update(feature.name for feature in features)


def ring(ranks: int, emulated: bool) -> None:
    """Records a ring that ran: on as many devices, or emulated on one."""
    _NOTES["rings"].add((ranks, "emulated" if emulated else "real"))


def error(dtype: str, result: str, size: float, tolerance: float) -> None:
    """Records the error of a result that is within its tolerance."""
    known = _NOTES["worst"].setdefault(dtype, {})
    found = {"error": size, "tolerance": tolerance}
    if result not in known or share(found) > share(known[result]):
        known[result] = found


def share(found: Any) -> float:
    """An error divided by its tolerance; the error itself if the tolerance is 0."""
    return found["error"] / found["tolerance"] if found["tolerance"] else found["error"]


def take() -> dict[str, Any]:
    """Returns what the current test has recorded so far, as plain data, and clears it for the next test."""
    found = {
        "needed": sorted(_NOTES["needed"]),
        "rings": [list(one) for one in sorted(_NOTES["rings"])],
        "worst": dict(_NOTES["worst"]),
    }
    for kind in _NOTES.values():
        kind.clear()
    return found
