# SPDX-License-Identifier: Apache-2.0
"""The ring sizes of the suite, and its three tiers: `full` includes `core`, and `exhaustive` includes `full`."""

from typing import Final

import pytest

CORE: Final = "core"
FULL: Final = "full"
EXHAUSTIVE: Final = "exhaustive"
RINGS: Final = (1, 2, 3, 4, 8)
TIERS: Final = {
    CORE: "every feature and every kind of promise at least once, in minutes on a laptop",
    FULL: "every named case on one ring, and every two levels of options and sizes together, on rings of up to 8",
    EXHAUSTIVE: "every named case on every ring and in every layout, by optimised programs: hours on a laptop",
}
"""The tiers and what they run, from the smallest to the largest. A test without a mark is in the full tier."""

MARK: Final = "ringattn_tier"


def mark(tier: str, *ids: str) -> pytest.MarkDecorator:
    """Puts a test into a tier, or only its parameter sets with these ids."""
    return getattr(pytest.mark, MARK)(tier, *ids)


core = mark(CORE)
"""Puts a whole test into the core tier."""


def contains(tier: str, own: str) -> bool:
    """Whether a run of `tier` includes a test whose own tier is `own`."""
    order = list(TIERS)
    return order.index(own) <= order.index(tier)


def tier_of(item: pytest.Item, parameters: str) -> str:
    """The tier of a test, by its nearest mark for these `parameters` (pytest's id without the backend); else full."""
    for found in item.iter_markers(MARK):
        tier, *ids = found.args
        if not ids or parameters in ids:
            return tier
    return FULL
