# SPDX-License-Identifier: Apache-2.0
"""Finds which option or size makes a call wrong: makes the call again without each of them."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from ringattn_core.errors import RingAttnError

from . import comparison
from .cases import FEATURES, Case
from .domains import BESIDE
from .ranks import Placed, Placement, place, run

MOST: Final = 3
"""How many failures a process investigates; each takes a call for each option and each unusual size."""
OPTIONS: Final = (*(name for name in FEATURES if name != "lse"), "scale", "lse")
PLAIN: Final[tuple[dict[str, Any], ...]] = (
    {"dtype": "float32"}, {"heads": 2, "kv_heads": 2}, {"head_dim": 16, "value_dim": 16}, {"batch": 2},
    {"gain": 1.0}, {"bias_offset": 0.0}, {"selected_size": 1}, {"groups": "1"},
)  # fmt: skip
"""Ordinary sizes, which take the place of a case's own. Lengths become about 40 queries and 40 keys on each rank."""
PLAIN_LENGTH: Final = 40

searches = 0
"""How many failures this process has investigated."""


def found(placed: Placed, gradients: bool) -> list[str]:
    """Lines for the message of a wrong call: without which options and with which ordinary sizes it is right."""
    global searches
    case = placed.case
    options = [name for name in OPTIONS if name in case.changes]
    if searches >= MOST:
        return [f"sizes: {_sizes(case)}"]
    searches += 1
    bare = _without(case, options)
    of_sizes = not options or not _right(placed, bare, placed.placement, gradients)
    case = bare if of_sizes else case
    right_without = [] if of_sizes else [o for o in options if _right(placed, _without(case, [o]), None, gradients)]
    right_with = [what for what, one, at in _plainer(case, placed.placement) if _right(placed, one, at, gradients)]
    also = ["wrong also without any option"] if of_sizes and options else []
    without = f"right without {' or without '.join(right_without)}" if right_without else ""
    if options and not of_sizes and not right_without:
        without = "wrong also without each single option, right without all of them"
    sizes = f"right with {' or with '.join(right_with)}" if right_with else ""
    own = f"sizes: {_sizes(placed.case)}"
    return [*also, *([without] if without else []), *([sizes] if sizes else []), own]


def _without(case: Case, options: list[str]) -> Case:
    """The case without these options."""
    defaults = {field.name: field.default for field in dataclasses.fields(Case)}
    beside = [name for option in options for name in BESIDE.get(option, {})]
    return dataclasses.replace(case, **{name: defaults[name] for name in (*options, *beside)})


def _plainer(case: Case, placement: Placement) -> Iterator[tuple[str, Case, Placement]]:
    """The case with each of its unusual sizes made ordinary, the size in words, and the placement."""
    for fields in PLAIN:
        if any(getattr(case, field) != x for field, x in fields.items()):
            own = " and ".join(f"{field}={x}" for field, x in fields.items())
            yield own, dataclasses.replace(case, **fields), placement
    step = placement.ring * (2 * case.selected_size if case.selected else 1)
    length = -(-PLAIN_LENGTH * placement.ring // step) * step
    if {case.q_length, case.kv_length} != {length}:
        yield f"{length} queries and keys", dataclasses.replace(case, q_length=length, kv_length=length), placement
    if placement.ring > 1:
        yield "one rank", case, dataclasses.replace(placement, ring=1, layout="contiguous")


def _right(placed: Placed, case: Case, placement: Placement | None, gradients: bool) -> bool:
    """Whether the backend gives the right answer to another case. A case that cannot be called is not right."""
    one = place(case, placement or placed.placement, placed.backend)
    try:
        comparison.check(run(one, gradients), one.case.answer, one.case)
    except (comparison.Wrong, RingAttnError, ValueError, TypeError):
        return False
    return True


def _sizes(case: Case) -> str:
    """The sizes of a case in words, those at their defaults included."""
    return (
        f"{case.dtype}, batch {case.batch}, {case.q_length} queries, {case.kv_length} keys, "
        f"{case.heads}/{case.kv_heads} heads of {case.head_dim}, values of {case.value_dim}"
    )
