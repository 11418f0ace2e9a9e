# SPDX-License-Identifier: Apache-2.0
"""Where each case of `cases.json` runs: its ring, its layout and its tier, for what a backend declares."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from ringattn_core.contract.features import Feature

from . import domains, tiers
from .cases import DTYPES, ENTRIES, Case, of_entry
from .ranks import Placement
from .tiers import RINGS

LAYOUTS: Final = ("contiguous", "zigzag", "striped")


@dataclasses.dataclass(frozen=True)
class Point:
    """A case with a ring and a layout, and the smallest tier that holds it. Its name is the same in every run."""

    name: str
    case: Case
    placement: Placement
    tier: str

    def __str__(self) -> str:
        return self.name


def points(largest: int = RINGS[-1]) -> list[Point]:
    """Every named case on every ring of at most `largest` ranks and in every layout.

    The tiers core and full have each case in one place, which `cases.json` names; the exhaustive tier has all.
    """
    found = []
    for entry in ENTRIES["named"]:
        chosen = _point(entry, largest)
        everywhere = (
            _at(chosen.case, ring, layout, (ring + place) % 2 == 0)
            for ring, (place, layout) in itertools.product(RINGS, enumerate(LAYOUTS))
            if ring <= largest and chosen.case.fits(ring, layout) and (ring > 1 or layout == LAYOUTS[0])
        )
        found += [chosen, *(one for one in everywhere if one.name != chosen.name)]
    return found


def mixtures(features: Collection[Feature], largest: int = RINGS[-1]) -> list[Point]:
    """The calls with many options at once, for a backend with these features."""
    return drawn(ENTRIES["mixtures"], features, largest)


def values(features: Collection[Feature], seed: int) -> list[Point]:
    """The calls drawn from the domains of all values: those of the release, and those that the seed draws."""
    return drawn((*ENTRIES["values"], *domains.today(seed)), features, 1)


def drawn(entries: Iterable[Mapping[str, Any]], features: Collection[Feature], largest: int) -> list[Point]:
    """The calls without what a backend does not declare; of those that are then the same, the first.

    A call of an undeclared dtype has a declared one instead, so that all its options still meet.
    """
    dtypes = [name for name in DTYPES if Feature[name.upper()] in features]
    found: dict[Any, Point] = {}
    for number, entry in enumerate(entries if dtypes else ()):
        point = _point(entry, largest)
        case, placement = point.case, point.placement
        if case.dtype not in dtypes:
            case = dataclasses.replace(case, dtype=dtypes[number % len(dtypes)])
        case = case.within(features)
        if not placement.needs <= set(features):
            placement = dataclasses.replace(placement, layout=LAYOUTS[0])
        alike = (*case.changes.items(), placement.ring, placement.layout)
        found.setdefault(alike, dataclasses.replace(point, case=case, placement=placement))
    return list(found.values())


def _point(entry: Mapping[str, Any], largest: int) -> Point:
    """The case of an entry in its own place; if that ring is too large, on the largest that the lengths fit."""
    case, layout = of_entry(entry), entry["layout"]
    name = f"{case}-ring{entry['ring']}-{layout}"
    ring = entry["ring"] if entry["ring"] <= largest else _largest(case, layout, largest)
    placement = Placement(ring, layout if ring > 1 else LAYOUTS[0], check_vma=entry["check_vma"])
    return Point(name, case, placement, entry["tier"])


def _at(case: Case, ring: int, layout: str, check_vma: bool) -> Point:
    return Point(f"{case}-ring{ring}-{layout}", case, Placement(ring, layout, check_vma=check_vma), tiers.EXHAUSTIVE)


def _largest(case: Case, layout: str, largest: int) -> int:
    rings: Iterable[int] = reversed([ring for ring in RINGS if ring <= largest])
    return next(ring for ring in rings if ring == 1 or case.fits(ring, layout))
