# SPDX-License-Identifier: Apache-2.0
"""Draws the calls of a release, as entries for `values` of `cases.json`.

    python -m ringattn_testing.conformance.draw_release SEED COUNT

Of many calls it takes those that bring most new values, options of single queries (both also by dtype and with
gradients), and pairs of options. An option counts where a kernel that ignores it is caught.
"""

import json
import sys
from collections.abc import Collection, Iterator
from typing import Any

from ringattn_conformance.cases import of_entry
from ringattn_conformance.domains import BESIDE, OPTIONS, SIZES, Entry, draw

from ringattn_testing.conformance.effects import WITHOUT, matters

Target = tuple[Any, int]
"""Something that a call brings, and its worth."""


def values(entry: Entry) -> Iterator[tuple[str, Any]]:
    """Each domain and the value that a call has from it; a pair of sizes counts as one value."""
    yield "lengths", (entry["q_length"], entry["kv_length"])
    yield "heads", (entry["heads"], entry["kv_heads"])
    names = (*SIZES, *OPTIONS, *BESIDE["bias"])
    yield from ((name, entry[name]) for name in names if name in entry)


def release(seed: int, count: int, tries: int = 1000) -> list[Entry]:
    every = [draw(seed * tries + number) for number in range(tries)]
    brings = {entry["seed"]: _targets(entry) for entry in every}
    judged: set[int] = set()
    met: set[Any] = set()
    found: list[Entry] = []
    while len(found) < count:
        best = max(every, key=lambda entry: _worth(brings[entry["seed"]], met))
        if best["seed"] not in judged:
            judged.add(best["seed"])
            brings[best["seed"]] = _targets(best, _without_effect(best))
            continue
        met |= {one for one, _ in brings[best["seed"]]}
        every.remove(best)
        name = "-".join([f"{len(found):02}", *(one for one in OPTIONS if one in best)])
        found.append({"name": name, "tier": "core" if len(found) < count // 4 else "full"} | best)
    return found


def _worth(targets: list[Target], met: Collection[Any]) -> int:
    return sum(weight for one, weight in targets if one not in met)


def _without_effect(entry: Entry) -> frozenset[str]:
    """The options of a call that a kernel may ignore and stay within the tolerance of the output."""
    case = of_entry({"name": "drawn"} | entry)
    return frozenset(name for name in WITHOUT if name in entry and not matters(case, name))


def _targets(entry: Entry, without_effect: Collection[str] = ()) -> list[Target]:
    """What a call brings, and how much that is worth. An option without effect brings only its value."""
    own = list(values(entry))
    on = [name for name in OPTIONS if name in entry and name not in without_effect]
    pairs = [((one, other), 1) for one in on for other in on if one < other]
    kinds = [(entry["dtype"], 2)] if entry.get("forward") else [(entry["dtype"], 2), ("gradients", 3)]
    alone = 1 == entry["q_length"] < entry["kv_length"]
    of_options = [((one, "one query", kind), 1) for one in on for kind, _ in kinds if alone]
    of_values = [((one, kind), weight) for one in own if one[0] not in without_effect for kind, weight in kinds]
    return [*(((one, "effect"), 3) for one in own if one[0] not in without_effect), *((one, 4) for one in own),
            *of_values, *of_options, *pairs]  # fmt: skip


if __name__ == "__main__":
    for entry in release(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(entry))
