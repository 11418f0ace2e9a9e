# SPDX-License-Identifier: Apache-2.0
"""Runs the call of one shard by its strategy, on a backend with a block kernel."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..backends.discovery import Registration
from ..contract.call import Call
from ..errors import InputError
from ..placement import axes
from ..ring import engine
from ..ring.forward import narrowed
from ..tuning.choice import with_parameters
from . import ulysses
from .choose import without_masks


def run(registration: Registration, call: Call) -> Any:
    """The output of one shard, or `(out, lse)`. On one rank all strategies are the same."""
    kernel = registration.implementation()
    strategy = call.strategy if axes.size("axis_name", call.axis_name or ()) > 1 else "ring"
    _refuse_static_masks(registration, call, strategy)
    if strategy == "ulysses":
        moved = ulysses.by_heads(call)
        chosen = with_parameters(registration, narrowed(moved))
        moved = dataclasses.replace(moved, fwd_params=chosen.fwd_params, bwd_params=chosen.bwd_params)
        return ulysses.by_tokens(call, engine.run(kernel, moved, stripe=ulysses.stripe(call)))
    out, lse = engine.run(kernel, with_parameters(registration, call), gathers=strategy == "all_gather")
    return (out, lse) if call.return_lse else out


def computed(call: Call, sizes: Mapping[str, int]) -> Call:
    """The call that the strategy gives to the ring engine, as shapes. `sizes` are the sizes of the mesh axes."""
    if call.strategy != "ulysses" or math.prod(sizes[name] for name in call.axis_name or ()) == 1:
        return call
    return ulysses.shapes_by_heads(call, sizes)


def _refuse_static_masks(registration: Registration, call: Call, strategy: str) -> None:
    """Raises if the kernel has only static masks, and this strategy needs a mask that is not static."""
    mixed = axes.size("axis_name", (call.axis_name or ())[:-1]) > 1
    if strategy in without_masks(registration, call.causal, call.layout, mixed):
        raise InputError(
            "strategy",
            f"{strategy!r} with causal=True and layout={call.layout!r} needs masks that the kernel of backend "
            f"{registration.name!r} does not have",
            "Pass strategy='ring', or another backend",
        )


def refuse_own_ring(name: str, call: Call) -> None:
    """Raises if a backend that drives the ring itself is asked for another strategy."""
    if call.strategy != "ring":
        raise InputError(
            "strategy",
            f"{call.strategy!r} needs a kernel of one block, and backend {name!r} drives the ring itself",
            "Pass strategy='ring', or another backend",
        )
