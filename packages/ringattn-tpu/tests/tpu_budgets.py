# SPDX-License-Identifier: Apache-2.0
"""How much each kernel and each ring may take on each chip, as libtpu 0.0.42.1 compiles them, and 5% more."""

from typing import Final

SLACK: Final = 1.05

BODIES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "ringattn_forward": {"v5e": (3907, 4163), "v5p": (4077, 4239), "v6e": (2363, 2697), "7x": (2468, 2780)},
    "ringattn_backward_fused": {"v5e": (8658, 9032), "v5p": (8621, 9435), "v6e": (5085, 5392), "7x": (4221, 4474)},
    "ringattn_backward_queries": {"v5e": (5202, 5387), "v5p": (5260, 5440), "v6e": (2986, 2998), "7x": (3133, 3122)},
    "ringattn_backward_keys": {"v5e": (7134, 7359), "v5p": (7128, 7546), "v6e": (4028, 4132), "7x": (3446, 3722)},
}
"""Bundles of a tile of 1024 x 1024 of each kernel on each chip: where all is visible, and where a mask is."""

VMEM: Final[dict[str, dict[str, float]]] = {
    "ringattn_forward": {"v5e": 4.1, "v5p": 6.4, "v6e": 3.7, "7x": 10.9},
    "ringattn_backward_fused": {"v5e": 4.6, "v5p": 20.6, "v6e": 4.3, "7x": 20.7},
    "ringattn_backward_queries": {"v5e": 3.9, "v5p": 6.7, "v6e": 4.2, "7x": 10.5},
    "ringattn_backward_keys": {"v5e": 7.2, "v5p": 8.0, "v6e": 7.2, "7x": 12.2},
}
"""MiB that each kernel may take of the vector memory of each chip, beside operands that XLA keeps there."""

PEAK: Final[dict[str, dict[str, float]]] = {
    "forward": {"v5e": 53, "v5p": 41, "v6e": 53, "7x": 45},
    "gradients": {"v5e": 113, "v5p": 127, "v6e": 117, "7x": 133},
}
"""MiB that a device may need for a ring whose shards have 4096 tokens and 4 heads of 128."""


def over(what: str, found: float, budget: float) -> str | None:
    """What is wrong where something is above its budget, and the slack."""
    if found <= budget * SLACK:
        return None
    return f"{what}: {found:g}, and the budget is {budget:g} and {SLACK - 1:.0%}"
