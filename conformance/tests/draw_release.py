# SPDX-License-Identifier: Apache-2.0
"""Draws the calls of a release: `python draw_release.py SEED COUNT` prints entries for `values` of `cases.json`.

Of many calls it takes those that bring most new values, also by dtype, single queries with options, and pairs of
options.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from ringattn_conformance.domains import BESIDE, OPTIONS, SIZES, Entry, draw


def values(entry: Entry) -> Iterator[tuple[str, Any]]:
    """Each domain and the value that a call has from it; a pair of sizes counts as one value."""
    yield "lengths", (entry["q_length"], entry["kv_length"])
    yield "heads", (entry["heads"], entry["kv_heads"])
    names = (*SIZES, *OPTIONS, *BESIDE["bias"])
    yield from ((name, entry[name]) for name in names if name in entry)


def release(seed: int, count: int, tries: int = 3000) -> list[Entry]:
    every = [draw(seed * tries + number) for number in range(tries)]
    met: set[Any] = set()
    found: list[Entry] = []
    for number in range(count):
        best = max(every, key=lambda entry: sum(weight for one, weight in _targets(entry) if one not in met))
        met |= {one for one, _ in _targets(best)}
        every.remove(best)
        name = "-".join([f"{number:02}", *(one for one in OPTIONS if one in best)])
        found.append({"name": name, "tier": "core" if number < count // 4 else "full"} | best)
    return found


def _targets(entry: Entry) -> list[tuple[Any, int]]:
    own = list(values(entry))
    on = [name for name in OPTIONS if name in entry]
    pairs = [((one, other), 1) for one in on for other in on if one < other]
    alone = [((one, "one query"), 3) for one in on if entry["q_length"] == 1]
    return [*((one, 4) for one in own), *(((one, entry["dtype"]), 2) for one in own), *alone, *pairs]


if __name__ == "__main__":
    for entry in release(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(entry))
