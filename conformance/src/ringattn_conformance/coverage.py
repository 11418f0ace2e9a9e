# SPDX-License-Identifier: Apache-2.0
"""Which declared features were compared with the oracle, in which dtypes, and which pairs no test compared."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from .tiers import RINGS

DTYPES: Final = ("FLOAT32", "FLOAT16", "BFLOAT16")
LAYOUTS: Final = ("CONTIGUOUS", "ZIGZAG", "STRIPED")
_RINGS: Final = tuple(f"ring of {ranks}" for ranks in RINGS)
_ONE_OF: Final = (DTYPES, LAYOUTS, _RINGS)
"""A call has exactly one item of each of these groups."""
_IMPOSSIBLE: Final = frozenset(
    frozenset(pair)
    for one, others in {
        "PRECISION": ("FLOAT16", "BFLOAT16"),
        "TWO_WAY": ("ring of 1", "ring of 2"),
        "ring of 1": ("ZIGZAG", "STRIPED"),
    }.items()
    for pair in itertools.product((one,), others)
)


def compared(tests: Iterable[tuple[str, Mapping[str, Any]]]) -> list[frozenset[str]]:
    """The features, layout and rings of each test that passed and compared numbers, from pairs of outcome and notes."""
    found = []
    for outcome, notes in tests:
        if outcome == "passed" and notes.get("worst"):
            needed = frozenset(notes["needed"])
            layout = needed & set(LAYOUTS) or {LAYOUTS[0]}
            found.append(needed | layout | {f"ring of {ranks}" for ranks, _ in notes.get("rings", ())})
    return found


def tried(feature: str, passes: Iterable[frozenset[str]]) -> dict[str, int]:
    """For each dtype, how many tests passed and compared numbers of a call that needs the feature."""
    counts = Counter(dtype for found in passes if feature in found for dtype in DTYPES if dtype in found)
    return {dtype: counts[dtype] for dtype in DTYPES if counts[dtype]}


def untried(declared: Collection[str], passes: Collection[frozenset[str]]) -> list[str]:
    """A sentence for each declared feature and declared dtype that no passing test had together."""
    found = []
    for feature in declared:
        counts = tried(feature, passes)
        dtypes = [feature] if feature in DTYPES else [dtype for dtype in DTYPES if dtype in declared]
        lacking = [one for one in dtypes if one not in counts and frozenset((feature, one)) not in _IMPOSSIBLE]
        found += [f"{feature} in {dtype.lower()}" for dtype in lacking if dtype != feature]
        found += [feature] if lacking == [feature] else []
    return found


def uncovered(declared: Iterable[str], passes: Collection[frozenset[str]]) -> list[str]:
    """Pairs out of declared features, layouts and ring sizes that a call can combine, but no passing test combined."""
    items = [*declared, LAYOUTS[0], *_RINGS]
    met = {frozenset(pair) for found in passes for pair in itertools.combinations(sorted(found), 2)}
    impossible = _IMPOSSIBLE | {frozenset(pair) for group in _ONE_OF for pair in itertools.combinations(group, 2)}
    pairs = (pair for pair in itertools.combinations(items, 2) if frozenset(pair) not in met | impossible)
    return [f"{one} with {other}" for one, other in pairs]
