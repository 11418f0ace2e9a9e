# SPDX-License-Identifier: Apache-2.0
"""The calls that judge a backend: each is a case with a ring, a layout and the tier that it belongs to."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from ringattn_core.contract.features import Feature

from . import domains, tiers
from .cases import DTYPES, ENTRIES, Case, of_entry
from .outcomes import features_of
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


@functools.cache
def calls(features: frozenset[Feature], seed: int) -> tuple[Point, ...]:
    """Every call that judges a backend with these features, including the calls drawn with `seed`.

    Backends with equal features share the calls, and so the answers of the oracle.
    """
    values = (*ENTRIES["values"], *domains.today(seed))
    return (*points(), *drawn(ENTRIES["design"], features), *drawn(values, features))


def points() -> list[Point]:
    """Each named case on the ring and layout that `cases.json` names, and on all others that divide its lengths.

    Only the exhaustive tier runs the others.
    """
    found = []
    for entry in ENTRIES["named"]:
        chosen = _point(entry)
        everywhere = (
            _at(chosen.case, ring, layout, (ring + place) % 2 == 0)
            for ring, (place, layout) in itertools.product(RINGS, enumerate(LAYOUTS))
            if chosen.case.fits(ring, layout) and (ring > 1 or layout == LAYOUTS[0])
        )
        found += [chosen, *(one for one in everywhere if one.name != chosen.name)]
    return found


def drawn(entries: Iterable[Mapping[str, Any]], features: Collection[Feature]) -> list[Point]:
    """The calls of these entries without options that need features outside `features`; equal calls are kept once.

    A call of an undeclared dtype takes a declared dtype, so that its other options are still tested together.
    """
    dtypes = [name for name in DTYPES if Feature[name.upper()] in features]
    found: dict[Any, Point] = {}
    for number, entry in enumerate(entries if dtypes else ()):
        point = _point(entry)
        case, placement = point.case, point.placement
        if case.dtype not in dtypes:
            case = dataclasses.replace(case, dtype=dtypes[number % len(dtypes)])
        case = case.within(features)
        if not placement.needs <= set(features):
            placement = dataclasses.replace(placement, layout=LAYOUTS[0])
        alike = (*case.changes.items(), placement.ring, placement.layout)
        found.setdefault(alike, dataclasses.replace(point, case=case, placement=placement))
    return list(found.values())


def untried(backend: str, seed: int, passed: Collection[str]) -> list[str]:
    """The pairs of a declared feature and a declared dtype ("CAUSAL in float16") that no passed test compares.

    `passed` has the names of the calls whose tests passed.
    """
    declared = features_of(backend)
    dtypes = {Feature[name.upper()] for name in DTYPES} & declared
    met = [
        point.case.with_heads_for(backend).needs
        | point.placement.needs
        | (frozenset() if point.case.forward else {Feature.GRADIENTS} & declared)
        for point in calls(declared, seed)
        if point.name in passed and not point.case.with_heads_for(backend).too_wide_for(backend)
    ]
    halves = {(Feature.PRECISION, Feature.FLOAT16), (Feature.PRECISION, Feature.BFLOAT16)}
    pairs = {(feature, dtype) for feature in declared - dtypes for dtype in dtypes} - halves
    pairs |= {(dtype, dtype) for dtype in dtypes}
    untried = [pair for pair in pairs if not any({*pair} <= needs <= declared for needs in met)]
    return sorted(f"{feature.name} in {dtype.name.lower()}" for feature, dtype in untried)


def _point(entry: Mapping[str, Any]) -> Point:
    return _at(of_entry(entry), entry["ring"], entry["layout"], entry["check_vma"], entry["tier"])


def _at(case: Case, ring: int, layout: str, check_vma: bool, tier: str = tiers.EXHAUSTIVE) -> Point:
    return Point(f"{case}-ring{ring}-{layout}", case, Placement(ring, layout, check_vma=check_vma), tier)
