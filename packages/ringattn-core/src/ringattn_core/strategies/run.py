# SPDX-License-Identifier: Apache-2.0
"""Runs the call of one shard by its strategy, on a backend with a block kernel."""

from typing import Any

from ..backends.discovery import Registration
from ..contract.call import Call
from ..errors import InputError
from ..placement import axes
from ..ring import engine
from ..ring.blocks import static_masks
from ..tuning.choice import with_parameters
from . import ulysses


def run(registration: Registration, call: Call) -> Any:
    """The output of one shard, or `(out, lse)`. On one rank all strategies are the same."""
    kernel = registration.implementation()
    ranks = axes.size("axis_name", call.axis_name or ())
    if call.strategy == "ulysses" and ranks > 1:
        moved = with_parameters(registration, ulysses.by_heads(call))
        return ulysses.by_tokens(call, engine.run(kernel, moved))
    gathers = call.strategy == "all_gather" and ranks > 1
    if gathers and call.causal and static_masks(kernel):
        raise InputError(
            "strategy",
            f"'all_gather' with causal=True needs a mask that depends on the rank, and the kernel of backend "
            f"{registration.name!r} has only static masks",
            "Pass strategy='ring' or 'ulysses', or another backend",
        )
    out, lse = engine.run(kernel, with_parameters(registration, call), gathers)
    return (out, lse) if call.return_lse else out


def refuse_own_ring(name: str, call: Call) -> None:
    """Raises if a backend that drives the ring itself is asked for another strategy."""
    if call.strategy != "ring":
        raise InputError(
            "strategy",
            f"{call.strategy!r} needs a kernel of one block, and backend {name!r} drives the ring itself",
            "Pass strategy='ring', or another backend",
        )
