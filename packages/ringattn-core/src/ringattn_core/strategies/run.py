# SPDX-License-Identifier: Apache-2.0
"""Runs the call of one shard by its strategy, on a backend with a block kernel."""

import dataclasses
from typing import Any

from ..backends.discovery import Registration
from ..contract.call import Call
from ..placement import axes
from ..ring import engine
from ..tuning.choice import with_parameters
from . import ulysses


def run(registration: Registration, call: Call) -> Any:
    """The output of one shard, or `(out, lse)`. `call.strategy` is one that `settled` returns."""
    moved = _moved(call)
    tuned = with_parameters(registration, moved.narrowed())
    moved = dataclasses.replace(moved, fwd_params=tuned.fwd_params, bwd_params=tuned.bwd_params)
    # After "ulysses" in the striped layout, a run of consecutive tokens has one token of each rank of the last axis.
    exchanged = call.strategy == "ulysses"
    stripe = axes.size("axis_name", (call.axis_name or ())[-1:]) if exchanged else 1
    result = engine.run(registration.implementation(), moved, gathers=call.strategy == "all_gather", stripe=stripe)
    if exchanged:
        return ulysses.by_tokens(call, result)
    return result if call.return_lse else result[0]


def tuned_as(call: Call) -> Call:
    """The call for which tuning chooses parameters, as kernels read it."""
    return _moved(call).narrowed()


def _moved(call: Call) -> Call:
    """The call that the engine runs: with "ulysses", it has some heads and all tokens of a group."""
    return ulysses.by_heads(call) if call.strategy == "ulysses" else call
