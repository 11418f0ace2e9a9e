# SPDX-License-Identifier: Apache-2.0
"""Runs the call of one shard by its strategy, on a backend with a block kernel."""

import dataclasses
from typing import Any

from ..backends.discovery import Registration
from ..contract.call import Call
from ..ring import engine
from ..ring.forward import narrowed
from ..tuning.choice import with_parameters
from . import ulysses


def run(registration: Registration, call: Call) -> Any:
    """The output of one shard, or `(out, lse)`. The strategy of the call is `settled`."""
    kernel = registration.implementation()
    if call.strategy == "ulysses":
        moved = ulysses.by_heads(call)
        chosen = with_parameters(registration, narrowed(moved))
        moved = dataclasses.replace(moved, fwd_params=chosen.fwd_params, bwd_params=chosen.bwd_params)
        return ulysses.by_tokens(call, engine.run(kernel, moved, stripe=ulysses.stripe(call)))
    out, lse = engine.run(kernel, with_parameters(registration, call), gathers=call.strategy == "all_gather")
    return (out, lse) if call.return_lse else out
