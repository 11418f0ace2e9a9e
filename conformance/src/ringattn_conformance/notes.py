# SPDX-License-Identifier: Apache-2.0
"""What a test of the suite finds out besides its outcome: the features, the rings, and the errors it measured."""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

Worst = dict[str, dict[str, dict[str, float]]]
"""By dtype and result: the error that came nearest to its tolerance, and that tolerance."""


class _Notes(NamedTuple):
    needed: set[str]
    refused: set[str]
    rings: set[tuple[int, str]]
    worst: Worst


_NOTES: Final = _Notes(set(), set(), set(), {})


def needs(features: Iterable[Any]) -> None:
    """An answer that needs these features is owed."""
    _NOTES.needed.update(feature.name for feature in features)


def refuses(features: Iterable[Any]) -> None:
    """A refusal is owed, for the lack of these."""
    _NOTES.refused.update(feature.name for feature in features)


def ring(ranks: int, emulated: bool) -> None:
    """A ring of so many ranks has run, on as many devices or played by one."""
    _NOTES.rings.add((ranks, "emulated" if emulated else "real"))


def error(dtype: str, result: str, size: float, tolerance: float) -> None:
    """A result is this far from the oracle's, which is within its tolerance."""
    known = _NOTES.worst.setdefault(dtype, {})
    found = {"error": size, "tolerance": tolerance}
    if result not in known or share(found) > share(known[result]):
        known[result] = found


def share(found: Any) -> float:
    """How much of its tolerance an error takes up."""
    return found["error"] / found["tolerance"] if found["tolerance"] else found["error"]


def taken() -> dict[str, Any]:
    """All notes since the last call, as JSON takes them."""
    found = {
        "needed": sorted(_NOTES.needed),
        "refused": sorted(_NOTES.refused),
        "rings": [list(one) for one in sorted(_NOTES.rings)],
        "worst": dict(_NOTES.worst),
    }
    for kind in _NOTES:
        kind.clear()
    return found
