# SPDX-License-Identifier: Apache-2.0
"""The factors of a call and their levels: each option, and the classes of each size, as `factors.json` lists them.

Kernels branch on sizes: on multiples of their tiles, on few queries, on heads that fill a register. A kernel is right
only if it is right on both sides of each branch, with every option. So `cases.json` has a covering design: calls in
which every two levels of two factors meet. `ringattn_testing.conformance.draw_design` computes it.
"""

from typing import Any, Final

from .cases import Case, load
from .ranks import Placement

_TABLE: Final = load("factors.json")
OPTIONS: Final[dict[str, tuple[Any, ...]]] = _TABLE["options"]
BESIDE: Final[dict[str, dict[str, tuple[Any, ...]]]] = _TABLE["beside"]
SIZES: Final[dict[str, dict[str, Any]]] = _TABLE["sizes"]
BY_CLASS: Final = ("q_length", "kv_length", "lengths", "head_dim", "value_dim", "group", "kv_heads", "batch")
"""The sizes: with each of their levels, every option is in a call of the core tier."""
LARGEST_OF_FEW: Final = 8
"""The most queries that kernels for few queries are known to take, so the largest of the second class of lengths."""
Level = tuple[str, str]
"""The name of a factor, and one of its levels."""


def length_class(length: int) -> str:
    """The class of a number of queries or keys on one rank."""
    if length > 2048:
        return "above 2048"
    if length >= 512:
        return "above 512" if length % 512 else "multiple of 512"
    if length <= LARGEST_OF_FEW:
        return "1" if length == 1 else f"2 to {LARGEST_OF_FEW}"
    for tile in (128, 64, 32):
        if length % tile == 0:
            return f"multiple of {tile}"
    if length % 64 == 63:
        return "one less than a tile"
    return "ragged above 64" if length > 64 else "9 to 62"


def bounds_of(case: Case) -> str:
    """Which bounds by position the masks of a call give to queries; "" where a `mask_builder` decides it."""
    left, right = case.window if isinstance(case.window, tuple) else (case.window, case.window)
    both = case.chunk is not None or case.ranges is not None
    first, last = both or left is not None, both or case.causal or right is not None
    return "" if case.builder else "both" if first and last else "first" if first else "last" if last else "none"


def sizes_of(case: Case, placement: Placement) -> dict[str, str]:
    """The level of each factor that is a size; sizes without a level are left out."""
    of_value = {"-1": "smaller", "0": "equal", "1": "larger"}
    relation = (case.value_dim > case.head_dim) - (case.value_dim < case.head_dim)
    found = {
        "dtype": case.dtype,
        "q_length": length_class(case.q_length // placement.ring),
        "kv_length": length_class(case.kv_length // placement.ring),
        "lengths": length_class(case.q_length // placement.ring) if case.q_length == case.kv_length else "",
        "head_dim": str(case.head_dim),
        "value_dim": of_value[str(relation)],
        "group": str(case.heads // case.kv_heads),
        "kv_heads": "one" if case.kv_heads == 1 else "several",
        "batch": str(case.batch),
        "scores": next((name for name, one in SIZES["scores"].items() if case.gain == one.get("gain", 1.0)), ""),
        "ring": str(placement.ring),
        "layout": placement.layout if placement.ring > 1 else "",
        "bounds": bounds_of(case),
    }
    return {factor: level for factor, level in found.items() if level in SIZES[factor]}


def options_of(case: Case) -> dict[str, str]:
    """The level of each option that the call has.

    Groups of `selected` are told by what they come to: where each head is a key head, "N" is "K".
    """
    given = {name: getattr(case, name) for name in OPTIONS}
    found = {name: str(x) for name, x in given.items() if x is not None and x is not False and x != 0.0}
    for option, more in BESIDE.items():
        found |= {name: str(getattr(case, name)) for name in more} if option in found else {}
    if "groups" in found:
        choices = {"1": 1, "K": case.kv_heads, "N": case.heads}[case.groups]
        found["groups"] = "1" if choices == 1 else "K" if choices == case.kv_heads else "N"
    return found


def levels_of(case: Case, placement: Placement) -> set[Level]:
    """All levels of a call. The factor `options` says how many it has: a kernel without any may have its own path."""
    on = options_of(case)
    many = sum(name in OPTIONS for name in on)
    return {*sizes_of(case, placement).items(), *on.items(), ("options", ("none", "one")[many] if many < 2 else "some")}
