# SPDX-License-Identifier: Apache-2.0
"""The ring sizes and layouts in which each named case runs, and the tier of each combination."""

import dataclasses
import itertools
from typing import Final

from . import tiers
from .cases import CASES, Case
from .ranks import Placement
from .tiers import RINGS

LAYOUTS: Final = ("contiguous", "zigzag", "striped")


@dataclasses.dataclass(frozen=True)
class Point:
    """A case with a ring size and a layout, and the smallest tier that holds it; `None` if no tier does."""

    case: Case
    placement: Placement
    tier: str | None

    def __str__(self) -> str:
        return f"{self.case}-ring{self.placement.ring}-{self.placement.layout}"


def places(case: Case, largest: int = RINGS[-1]) -> list[tuple[int, str]]:
    """All pairs of a ring size up to `largest` and a layout that the case divides into; one rank has one layout."""
    every = itertools.product([ring for ring in RINGS if ring <= largest], LAYOUTS)
    return [(ring, layout) for ring, layout in every if case.fits(ring, layout) and (ring > 1 or layout == LAYOUTS[0])]


def points(largest: int = RINGS[-1]) -> list[Point]:
    """Every named case on every ring and in every layout; rings of more than `largest` ranks are in no tier.

    The full tier has each case in one place, the core tier has the cases that are marked so, and the exhaustive tier
    has all points.
    """
    found = []
    for case in CASES:
        possible, chosen = places(case, largest), one_place(case, largest)
        for turn, place in enumerate(places(case), start=case.number):
            own = (tiers.CORE if case.core else tiers.FULL) if place == chosen else tiers.EXHAUSTIVE
            found.append(Point(case, Placement(*place, check_vma=turn % 2 == 0), own if place in possible else None))
    return found


def one_place(case: Case, largest: int = RINGS[-1]) -> tuple[int, str]:
    """The ring and the layout of a case in the tiers core and full: by `case.ring`, or else a hash of its name.

    So a new case moves no other. The ring has several ranks where the lengths allow.
    """
    every, number = places(case, largest), case.number
    rings = list(dict.fromkeys(ring for ring, _ in every if ring > 1)) or [1]
    rings = [case.ring] if case.ring in rings else rings
    possible = [place for place in every if place[0] == rings[number % len(rings)]]
    return possible[(number >> 8) % len(possible)]
