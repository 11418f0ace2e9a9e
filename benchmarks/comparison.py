# SPDX-License-Identifier: Apache-2.0
"""Which differences between two runs of a suite exceed their noise.

A difference counts if the rounds of one run are all slower than all rounds of the other, after the machine's drift is
divided out: the median of what the rivals took in the second run over what they took in the first.
"""

import math
import statistics
from typing import Any

from measuring import Row
from rivals import OURS

Key = tuple[str, str, str, int]


def report(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints the differences. Returns 1 if ours became slower by more than noise, and 2 for incomparable runs."""
    same = {"suite": (before["suite"], after["suite"])}
    same |= {name: (before["machine"][name], after["machine"][name]) for name in ("device", "devices")}
    for name, (old, new) in same.items():
        if old != new:
            print(f"These runs cannot be compared: their {name} is {old!r} and {new!r}.")
            return 2
    old, new = _timed(before), _timed(after)
    both = [key for key in old if key in new]
    if not both:
        print("These runs have no measurement in common.")
        return 2
    drift = drift_of(old, new)
    print(f"before: {before['machine']['date']}, commit {before['machine']['commit']}, JAX {before['machine']['jax']}")
    print(f"after:  {after['machine']['date']}, commit {after['machine']['commit']}, JAX {after['machine']['jax']}")
    print(f"The machine: rivals took {drift:.3f} times as long in the median; this is divided out below.\n")
    expected = 0.0
    different: list[tuple[Key, float]] = []
    for key in both:
        first, second = old[key].seconds, tuple(x / drift for x in new[key].seconds)
        expected += 2 / math.comb(len(first) + len(second), len(first))
        if min(second) > max(first) or max(second) < min(first):
            different.append((key, statistics.median(second) / statistics.median(first)))
    for (workload, part, who, ring), ratio in sorted(different, key=lambda item: -item[1]):
        where = f"{workload}, {part}: {who}" + (f", ring of {ring}" if ring > 1 else "")
        print(f"{'slower' if ratio > 1 else 'faster'}  {ratio:6.3f} x  {where}")
    print(
        f"{len(different)} of {len(both)} measurements differ by more than their noise; "
        f"chance alone would make about {expected:.1f} of them differ."
    )
    for key in sorted({*_rows(before), *_rows(after)}):
        mine, yours = (_rows(run).get(key) for run in (before, after))
        if (mine is None or mine.problem) != (yours is None or yours.problem):
            print(f"{', '.join(map(str, key))}: before {_state(mine)}; after {_state(yours)}")
    return int(any(ratio > 1 and key[2].startswith(OURS) for key, ratio in different))


def drift_of(old: dict[Key, Row], new: dict[Key, Row]) -> float:
    """How much longer rivals took in the second run: the change of the machine. 1 without rivals."""
    ratios = [
        statistics.median(new[key].seconds) / statistics.median(old[key].seconds)
        for key in old
        if key in new and not key[2].startswith(OURS)
    ]
    return statistics.median(ratios) if ratios else 1.0


def _rows(run: dict[str, Any]) -> dict[Key, Row]:
    return {(row.workload, row.part, row.who, row.ring): row for row in run["rows"]}


def _timed(run: dict[str, Any]) -> dict[Key, Row]:
    return {key: row for key, row in _rows(run).items() if row.seconds}


def _state(row: Row | None) -> str:
    return "not in the run" if row is None else row.problem or "measured"
