# SPDX-License-Identifier: Apache-2.0
"""Output, lse and gradients are the oracle's, for options alone and together, over the whole range of their values."""

from typing import Any

import pytest
from ringattn_core import MaskInfo
from ringattn_core.backends import discovery
from ringattn_core.contract.features import Feature

from ringattn_conformance import tiers
from ringattn_conformance.cases import NAMED
from ringattn_conformance.lattice import Point
from ringattn_conformance.outcomes import agrees
from ringattn_conformance.ranks import Arrays, Placement, place


def test_outputs_and_gradients_are_those_of_the_oracle(ringattn_backend: str, ringattn_point: Point):
    agrees(place(ringattn_point.case, ringattn_point.placement, ringattn_backend))


@tiers.mark(tiers.CORE, "causal-bfloat16")
@pytest.mark.parametrize("name", ["everything", "causal-bfloat16"])
def test_one_device_may_play_all_ranks(ringattn_backend: str, name: str):
    placement = Placement(4, "zigzag", emulated=True)
    agrees(place(NAMED[name], placement, ringattn_backend))


STRATEGIES = [("gqa", "all_gather"), ("causal-bfloat16", "ulysses"), ("range-gaps", "all_gather")]
STRATEGIES += [("range-heads", "ulysses")]


@tiers.core
@pytest.mark.parametrize(("name", "strategy"), STRATEGIES)
def test_keys_may_be_gathered_at_once_and_heads_exchanged_for_tokens(ringattn_backend: str, name: str, strategy: str):
    """Block kernels only: core calls a backend's own ring function for no strategy but "ring"."""
    if discovery.get(ringattn_backend).descriptor().kernel is not None:
        agrees(place(NAMED[name], Placement(2, "zigzag", strategy=strategy), ringattn_backend))


OF_CORE: dict[str, tuple[str, dict[str, Any]]] = {
    "balance": ("range-heads", {"balance": "zigzag"}),
    "promise": ("range-gaps", {"max_distance": (16, 13)}),
    "expand": ("range-gaps", {"value": None, "expand": lambda x, _: x}),
    "mask_info": ("range-heads", {"kv_range": None}),
}
"""A case with ranges, and more options of its call that no kernel sees."""


@tiers.core
@pytest.mark.parametrize("name", OF_CORE)
def test_ranges_stay_with_their_queries_whatever_core_does(ringattn_backend: str, name: str):
    case, options = OF_CORE[name]
    placed = place(NAMED[case], Placement(4), ringattn_backend)

    def local(operands: Arrays, fixed: Arrays) -> Arrays:
        more = {
            "expand": {"key": (operands["k"], operands["v"])},
            "mask_info": {"mask_info": MaskInfo(kv_range=(fixed["first"], fixed["last"]))},
        }
        return placed.local(operands, fixed, **options, **more.get(name, {}))

    agrees(placed, needs=[Feature.ZIGZAG] if name == "balance" else [], local=local)
