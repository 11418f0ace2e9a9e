# SPDX-License-Identifier: Apache-2.0
"""How much each kernel and each ring may take on each chip, as libtpu 0.0.42.1 compiles them, and 5% more."""

from typing import Final

SLACK: Final = 1.05

BODIES: Final[dict[str, dict[str, tuple[int, ...]]]] = {}
"""Bundles of a tile of 1024 x 1024 of each kernel on each chip: where all is visible, and where a mask is."""

VMEM: Final[dict[str, float]] = {}
"""MiB that a kernel may take of the vector memory, on any chip, beside operands that XLA keeps there."""

PEAK: Final[dict[str, dict[str, float]]] = {}
"""MiB that a device may need for a ring whose shards have 4096 tokens and 4 heads of 128."""


def over(what: str, found: float, budget: float) -> str | None:
    """What is wrong where something is above its budget, and the slack."""
    if found <= budget * SLACK:
        return None
    return f"{what}: {found:g}, and the budget is {budget:g} and {SLACK - 1:.0%}"
