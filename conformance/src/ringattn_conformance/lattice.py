# SPDX-License-Identifier: Apache-2.0
"""On which rings and in which layouts each case runs."""

import dataclasses
import itertools
from typing import Final

from .cases import CASES, Case
from .ranks import Placement

RINGS: Final = (1, 2, 3, 4, 8)
LAYOUTS: Final = ("contiguous", "zigzag", "striped")


@dataclasses.dataclass(frozen=True)
class Point:
    """A case somewhere on the lattice of rings and layouts."""

    case: Case
    placement: Placement

    def __str__(self) -> str:
        return f"{self.case}-ring{self.placement.ring}-{self.placement.layout}"


def places(case: Case) -> list[tuple[int, str]]:
    """Every ring and layout that the case fits; on one rank all layouts are one."""
    every = itertools.product(RINGS, LAYOUTS)
    return [(ring, layout) for ring, layout in every if case.fits(ring, layout) and (ring > 1 or layout == LAYOUTS[0])]


def points(full: bool) -> list[Point]:
    """The whole product for the core options; for the rest a ring of four and one other, by turns."""
    found = []
    for number, case in enumerate(CASES):
        possible = places(case)
        chosen = possible if full or case.core else _by_turns(number, possible)
        found += [
            Point(case, Placement(ring, layout, check_vma=turn % 2 == 0))
            for turn, (ring, layout) in enumerate(chosen, start=number)
        ]
    return found


def _by_turns(number: int, possible: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Consecutive cases meet consecutive layouts on a ring of four, and consecutive other rings."""
    other = [ring for ring in RINGS if ring != 4][number % 4]
    on_four, on_other = ([place for place in possible if place[0] == ring] for ring in (4, other))
    return [on_four[number % len(on_four)], on_other[number // 4 % len(on_other)]]
