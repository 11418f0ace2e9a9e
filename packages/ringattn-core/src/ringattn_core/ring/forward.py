# SPDX-License-Identifier: Apache-2.0
"""The forward pass round the ring: each hop sends the keys on and computes with the keys that are here."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from ..contract import packing
from ..contract.call import Call
from ..contract.merge import with_sinks
from ..contract.protocol import Block, Partial
from . import batching, hops, parcels
from .blocks import Ring, block, gathered
from .directions import Direction, Location, joined, split
from .remat import LSE_NAME, OUT_NAME
from .sends import Wires, after, after_hop, permuted, wire
from .whole_keys import whole_keys

Result = tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]
Partials = tuple[Partial, ...]
"""One partial result for each direction round the ring."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the backward pass reads: `out` and `lse` are as returned.

    In `call`, the ids and positions of keys are those of all ranks.
    """

    call: Call
    location: Location
    out: Float[Array, "B T N Hv"]
    lse: Float32[Array, "B N T"]


def forward(ring: Ring, call: Call, location: Location) -> tuple[Result, Residuals]:
    """Runs all hops on this rank. Returns `(out, lse)`, and the residuals for the backward pass."""
    call = gathered(ring, narrowed(call), location.rank)
    kernel, directions = batching.forward(ring.kernel), split(ring.plan.signs, call, location)
    if ring.plan.ranks == 1:
        alone = block(ring, directions[0], whole_keys(ring, call, location), 0)
        partial = kernel(dataclasses.replace(alone, final=call.softmax_aux is None), None)
    else:
        partial = _joined(_Pass(ring, directions, kernel).all_hops())
    partial = with_sinks(partial, sinks_of(call))
    out = checkpoint_name(partial.out.astype(call.query.dtype), OUT_NAME)
    lse = checkpoint_name(partial.lse, LSE_NAME)
    return (out, lse), Residuals(call, location, out, lse)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """What all hops of the forward pass share."""

    ring: Ring
    directions: Sequence[Direction]
    kernel: Callable[[Block, Partial | None], Partial]

    def all_hops(self) -> Partials:
        """The partial results over all hops."""
        plan = self.ring.plan
        wires = tuple(wire(self.ring, packing.pack_to_send(each.call.key, each.call.value)) for each in self.directions)
        first, *rounds = zip(plan.rounds, (*(1 for _ in plan.rounds[1:]), None), strict=True)
        return hops.repeated(self.round, self.round(wires, None, *first), rounds, plan.inner)[1]

    def round(self, wires: Wires, partials: Partials | None, base: Any, ahead: int | None) -> tuple[Any, Partials]:
        """Runs one round of the inner ring, whose first offset is `base`.

        Meanwhile the keys in `wires` travel `ahead` steps along the outer ring. Returns the keys that arrive there,
        which the next round begins with, and the partial results.
        """
        plan, following = self.ring.plan, None
        if ahead is not None:
            following = permuted(self.ring, self.directions, self._after_hop(wires, partials), ahead, outer=True)
        first, *steps = zip((base + offset for offset in plan.round), (*plan.shifts, None), strict=True)
        return following, hops.repeated(self.hop, self.hop(wires, partials, *first), steps)[1]

    def hop(self, wires: Wires, partials: Partials | None, offset: Any, shift: int | None) -> tuple[Wires, Partials]:
        """Sends the keys `shift` ranks on, and continues each partial result with the keys that are here.

        Every send is issued before the kernels of this hop and after the kernels of the hop before. The kernels of a
        hop also wait for the kernels of the hop before: where results are merged, nothing else orders them, and XLA
        could run them before the kernels that should hide their send.
        """
        wires = self._after_hop(wires, partials)
        following = wires if shift is None else permuted(self.ring, self.directions, wires, shift)
        before = partials or [None] * len(wires)
        made = [self.visit(*each, offset) for each in zip(self.directions, wires, before, strict=True)]
        return following, tuple(made)

    def _after_hop(self, wires: Wires, partials: Partials | None) -> Wires:
        """The keys, ordered after the kernels of the hop before."""
        return tuple(after(self.ring, x, [partial.lse for partial in partials or ()]) for x in wires)

    def visit(self, direction: Direction, x: parcels.Wire, partial: Partial | None, offset: Any) -> Partial:
        """Continues the partial result of one direction with the keys in `x`."""
        here = direction if partial is None else after_hop(direction, partial.lse)
        kv = parcels.from_wire(x, direction.call.key.dtype)
        return self.kernel(block(self.ring, here, kv, offset), partial)


def sinks_of(call: Call) -> Float32[Array, "N n"] | None:
    """The sinks. +inf becomes NaN, because an infinite sink would silently hide every key."""
    sinks = call.softmax_aux
    return None if sinks is None else jnp.where(jnp.isposinf(sinks), jnp.nan, sinks)


def narrowed(call: Call) -> Call:
    """The call with keys and values in the dtype of the queries, and its bias in that of the caller, for kernels."""
    key, value = (x.astype(call.query.dtype) for x in (call.key, call.value))
    bias = call.bias if call.bias is None else call.bias.astype(call.bias_dtype or call.bias.dtype)
    return dataclasses.replace(call, key=key, value=value, bias=bias)


def _joined(partials: Partials) -> Partial:
    """Joins the heads of all directions to one partial result."""
    return Partial(joined([x.out for x in partials], 2), joined([x.lse for x in partials], 1))
