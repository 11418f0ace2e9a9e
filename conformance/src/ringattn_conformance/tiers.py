# SPDX-License-Identifier: Apache-2.0
"""How much of the suite a run tries: which rings, and three tiers, each inside the next."""

from typing import Final

import pytest

CORE: Final = "core"
FULL: Final = "full"
EXHAUSTIVE: Final = "exhaustive"
RINGS: Final = (1, 2, 3, 4, 8)
TIERS: Final = {
    CORE: "every feature and every kind of promise at least once, in minutes on a laptop",
    FULL: "every case, on two rings each, the most used options on every ring and in every layout",
    EXHAUSTIVE: "every case on every ring and in every layout, by optimised programs: hours on a laptop",
}
"""From the smallest on, a sentence each. A test that names no tier is of the full one."""

MARK: Final = "ringattn_tier"


def mark(tier: str | None, *ids: str) -> pytest.MarkDecorator:
    """Puts a test, or only its parameters of these ids, into a tier; `None` is in no tier at all."""
    return getattr(pytest.mark, MARK)(tier, *ids)


core = mark(CORE)
"""Puts a whole test into the core tier."""


def contains(tier: str, own: str | None) -> bool:
    """Whether a test of the tier `own` is run where `tier` is asked for."""
    order = list(TIERS)
    return own is not None and order.index(own) <= order.index(tier)


def tier_of(item: pytest.Item, parameters: str) -> str | None:
    """The tier of a test, whose parameters, the backend aside, have that id; the nearest mark decides."""
    for found in item.iter_markers(MARK):
        tier, *ids = found.args
        if not ids or parameters in ids:
            return tier
    return FULL
