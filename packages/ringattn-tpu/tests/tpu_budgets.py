# SPDX-License-Identifier: Apache-2.0
"""How much each kernel and each ring may take on each chip, as libtpu 0.0.42.1 compiles them, and 5% more."""

from typing import Final

SLACK: Final = 1.05

# One selection of the scores serves all kernels, where each kernel selected its own gradients: masked bodies are 2%
# shorter over all kernels and chips. Longer are ringattn_backward_queries on v6e (by 103 bundles), backward_fused
# on v5e (by 95) and backward_keys on 7x (by 48).
BODIES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "ringattn_forward": {"v5e": (3874, 4141), "v5p": (3996, 4220), "v6e": (2362, 2685), "7x": (2462, 2725)},
    "ringattn_backward_fused": {"v5e": (8658, 9127), "v5p": (8621, 8876), "v6e": (5085, 5269), "7x": (4221, 4263)},
    "ringattn_backward_queries": {"v5e": (5202, 5319), "v5p": (5260, 5253), "v6e": (2986, 3101), "7x": (3133, 3104)},
    "ringattn_backward_keys": {"v5e": (7153, 7281), "v5p": (7141, 7041), "v6e": (4017, 4051), "7x": (3331, 3770)},
}
"""Bundles of a tile of 1024 x 1024 of each kernel on each chip: where all is visible, and where a mask is."""

VMEM: Final[dict[str, dict[str, float]]] = {
    "ringattn_forward": {"v5e": 4.1, "v5p": 6.3, "v6e": 3.7, "7x": 10.8},
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
