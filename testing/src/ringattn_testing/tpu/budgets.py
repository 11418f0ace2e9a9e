# SPDX-License-Identifier: Apache-2.0
"""How much each kernel and each ring may take on each chip, as libtpu 0.0.42.1 compiles them, and 5% more."""

from typing import Final

SLACK: Final = 1.05

VMEM: Final[dict[str, dict[str, float]]] = {
    "ringattn_forward": {"v5e": 4.1, "v5p": 6.3, "v6e": 4.2, "7x": 11.5},
    "ringattn_backward_fused": {"v5e": 4.6, "v5p": 20.6, "v6e": 4.3, "7x": 20.2},
    "ringattn_backward_queries": {"v5e": 3.9, "v5p": 6.5, "v6e": 4.2, "7x": 10.5},
    "ringattn_backward_keys": {"v5e": 7.1, "v5p": 7.7, "v6e": 7.2, "7x": 12.2},
}
"""MiB that each kernel may take of the vector memory of each chip, beside operands that XLA keeps there."""

PEAK: Final[dict[str, dict[str, float]]] = {
    "forward": {"v5e": 52.3, "v5p": 40, "v6e": 52.3, "7x": 44.1},
    "gradients": {"v5e": 112.2, "v5p": 120.1, "v6e": 116.2, "7x": 124.2},
}
"""MiB that a device may need for a ring whose shards have 4096 tokens and 4 heads of 128."""


def over(what: str, found: float, budget: float) -> str | None:
    """What is wrong where something is above its budget, and the slack."""
    if found <= budget * SLACK:
        return None
    return f"{what}: {found:g}, and the budget is {budget:g} and {SLACK - 1:.0%}"
