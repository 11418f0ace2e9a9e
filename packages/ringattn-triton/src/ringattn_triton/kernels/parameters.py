# SPDX-License-Identifier: Apache-2.0
"""Which pointers a kernel's parameters are: one each, except for `P`, the named tuple `Inputs`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .tokens import Inputs


def by_parameter(names: Sequence[str], values: Iterable[Any]) -> dict[str, Any]:
    """Values of all pointers, in order, by the kernel's parameters; `names` may go on with others."""
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
    """Where Triton finds each pointer: the number of its parameter, and its place in a tuple."""
    found: list[tuple[int, ...]] = []
    for number, name in enumerate(names):
        if name in pointers:
            inside = range(len(Inputs._fields)) if name == "P" else None
            found += [(number,)] if inside is None else [(number, place) for place in inside]
    return found


def labels(names: Sequence[str]) -> list[str]:
    """What an error calls each pointer."""
    return [label for name in names for label in ([f"P.{x}" for x in Inputs._fields] if name == "P" else [name])]
