# SPDX-License-Identifier: Apache-2.0
"""Assigns the pointers of a launch to a kernel's parameters: one pointer each, but a tuple `Inputs` of them to `P`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .tokens import Inputs


def by_parameter(names: Sequence[str], values: Iterable[Any]) -> dict[str, Any]:
    """Maps a kernel's parameters `names`, except the constants at their end, to `values`; `P` takes an `Inputs`."""
    rest = list(values)
    found = {}
    for name in names:
        if not rest:
            break
        count = len(Inputs._fields) if name == "P" else 1
        taken, rest = rest[:count], rest[count:]
        found[name] = Inputs(*taken) if name == "P" else taken[0]
    assert not rest, f"{len(rest)} pointers more than parameters {tuple(names)}"
    return found


def paths(names: Sequence[str], pointers: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The path of each pointer in Triton's signature: its parameter's number, and in `P` its field's number too."""
    found: list[tuple[int, ...]] = []
    for number, name in enumerate(names):
        if name in pointers:
            inside = range(len(Inputs._fields)) if name == "P" else None
            found += [(number,)] if inside is None else [(number, place) for place in inside]
    return found


def labels(names: Sequence[str]) -> list[str]:
    """What error messages call each pointer: the name of its parameter, or `P.x` for the field `x` of `P`."""
    return [label for name in names for label in ([f"P.{x}" for x in Inputs._fields] if name == "P" else [name])]
