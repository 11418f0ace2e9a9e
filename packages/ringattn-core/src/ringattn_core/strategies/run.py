# SPDX-License-Identifier: Apache-2.0
"""Runs the call of one shard by its strategy, on a backend with a block kernel."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ..backends.discovery import Registration
from ..contract.call import Call
from ..placement import axes
from ..ring import engine
from ..tuning.choice import with_parameters
from . import ulysses


def run(registration: Registration, call: Call, usual: str, differentiated: str) -> Any:
    """The output of one shard, or `(out, lse)`, by one of the two strategies that `settled` returns.

    It is `usual`, or `differentiated` where JAX differentiates the call.
    """

    def by(strategy: str) -> Callable[[Call], Any]:
        return lambda call: _run(registration, dataclasses.replace(call, strategy=strategy))

    return (by(usual) if usual == differentiated else by_need(by(usual), by(differentiated)))(call)


def by_need(usual: Callable[[Any], Any], differentiated: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that computes `usual`; where JAX differentiates it, `differentiated` replaces it in both passes.

    The two must compute the same values. `differentiated` does not learn which inputs are held fixed.
    """
    both = jax.custom_vjp(usual)
    both.defvjp(lambda x: jax.vjp(differentiated, x), lambda pullback, cotangents: pullback(cotangents))
    return both


def tuned_as(call: Call) -> Call:
    """The call for which tuning chooses parameters, as kernels read it."""
    return _moved(call).narrowed()


def _moved(call: Call) -> Call:
    """The call that the engine runs: with "ulysses", it has some heads and all tokens of a group."""
    return ulysses.by_heads(call) if call.strategy == "ulysses" else call


def _run(registration: Registration, call: Call) -> Any:
    moved = _moved(call)
    chosen = with_parameters(registration, moved.narrowed())
    moved = dataclasses.replace(moved, fwd_params=chosen.fwd_params, bwd_params=chosen.bwd_params)
    # After "ulysses" in the striped layout, a run of consecutive tokens has one token of each rank of the last axis.
    exchanged = call.strategy == "ulysses"
    stripe = axes.size("axis_name", (call.axis_name or ())[-1:]) if exchanged else 1
    result = engine.run(registration.implementation(), moved, gathers=call.strategy == "all_gather", stripe=stripe)
    if exchanged:
        return ulysses.by_tokens(call, result)
    return result if call.return_lse else result[0]
