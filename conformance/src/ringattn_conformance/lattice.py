# SPDX-License-Identifier: Apache-2.0
"""The ring sizes and layouts in which each case runs, and the tier of each combination."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, Final

import pytest

from . import tiers
from .cases import CASES, Case
from .ranks import Placement
from .tiers import RINGS

LAYOUTS: Final = ("contiguous", "zigzag", "striped")
ESSENTIAL: Final = frozenset({
    "plain", "causal", "window", "chunk", "segments", "positions-restart-rows", "mask-of-heads", "dense-mask-heads",
    "gqa", "value-dim", "cross-causal", "soft-cap", "sinks", "bias", "alibi", "dropout", "fused-backward",
    "gqa-causal-segments", "segments-unseen-rank", "everything", "causal-bfloat16", "causal-float16",
    "everything-bfloat16", "long-causal",
})  # fmt: skip
"""The cases of the core tier: at least one for each feature."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A case with a ring size and a layout."""

    case: Case
    placement: Placement

    def __str__(self) -> str:
        return f"{self.case}-ring{self.placement.ring}-{self.placement.layout}"


def places(case: Case, largest: int = RINGS[-1]) -> list[tuple[int, str]]:
    """All pairs of a ring size up to `largest` and a layout that the case divides into; one rank has one layout."""
    every = itertools.product([ring for ring in RINGS if ring <= largest], LAYOUTS)
    return [(ring, layout) for ring, layout in every if case.fits(ring, layout) and (ring > 1 or layout == LAYOUTS[0])]


def points(largest: int = RINGS[-1]) -> list[tuple[Point, str | None]]:
    """Every point with the smallest tier that holds it, or `None` for rings of more than `largest` ranks.

    A case takes turns: it has a ring of four and one other ring, and other cases have other layouts. The core tier has
    the turns of the essential cases, and the most used options on two ranks in every layout. The full tier has the
    turns of all cases, and the most used options everywhere. The exhaustive tier has all points.
    """
    found = []
    for number, case in enumerate(CASES):
        possible = places(case, largest)
        turns = _by_turns(number, possible)
        for turn, place in enumerate(places(case), start=number):
            point = Point(case, Placement(*place, check_vma=turn % 2 == 0))
            found.append((point, _tier(case, place, turns) if place in possible else None))
    return found


def parameters(cases: Iterable[Case]) -> list[Any]:
    """The cases as parameters of pytest; the essential ones are in the core tier."""
    return [
        pytest.param(case, id=case.name, marks=[tiers.core] if case.name in ESSENTIAL else []) for case in cases
    ]  # fmt: skip


def one_place(case: Case, number: int, largest: int = RINGS[-1]) -> tuple[int, str]:
    """A ring of several ranks and a layout, which differ from one number to the next."""
    every = places(case, largest)
    rings = list(dict.fromkeys(ring for ring, _ in every if ring > 1)) or [1]
    possible = [place for place in every if place[0] == rings[number % len(rings)]]
    return possible[number % len(possible)]


def _tier(case: Case, place: tuple[int, str], turns: list[tuple[int, str]]) -> str:
    if case.name in ESSENTIAL and (place in turns or (case.core and place[0] == RINGS[1])):
        return tiers.CORE
    return tiers.FULL if case.core or place in turns else tiers.EXHAUSTIVE


def _by_turns(number: int, possible: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The places of case `number`: a ring of four and one other; the next number has the next layout and ring."""
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
