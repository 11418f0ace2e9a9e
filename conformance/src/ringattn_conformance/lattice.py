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


def places(case: Case, largest: int = RINGS[-1]) -> list[tuple[int, str]]:
    """Every ring of at most `largest` ranks and every layout that the case fits; on one rank all layouts are one."""
    every = itertools.product([ring for ring in RINGS if ring <= largest], LAYOUTS)
    return [(ring, layout) for ring, layout in every if case.fits(ring, layout) and (ring > 1 or layout == LAYOUTS[0])]


def points(full: bool, largest: int = RINGS[-1]) -> list[Point]:
    """The whole product for the core options; for the rest the largest ring up to four and one other, by turns."""
    found = []
    for number, case in enumerate(CASES):
        possible = places(case, largest)
        chosen = possible if full or case.core else _by_turns(number, possible)
        found += [
            Point(case, Placement(ring, layout, check_vma=turn % 2 == 0))
            for turn, (ring, layout) in enumerate(chosen, start=number)
        ]
    return found


def one_place(case: Case, number: int, largest: int = RINGS[-1]) -> tuple[int, str]:
    """Some ring of several ranks, and a layout: another one for the next number."""
    rings = [ring for ring in RINGS[1:] if ring <= largest] or [1]
    possible = [place for place in places(case, largest) if place[0] == rings[number % len(rings)]]
    return possible[number % len(possible)]


def _by_turns(number: int, possible: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Consecutive cases meet consecutive layouts on a ring of four, and consecutive other rings."""
    rings = list(dict.fromkeys(ring for ring, _ in possible))
    main = max(ring for ring in rings if ring <= 4)
    on_main = [place for place in possible if place[0] == main]
    chosen = [on_main[number % len(on_main)]]
    others = [ring for ring in rings if ring != main]
    if others:
        other = others[number % len(others)]
        on_other = [place for place in possible if place[0] == other]
        chosen.append(on_other[number // len(others) % len(on_other)])
    return chosen
