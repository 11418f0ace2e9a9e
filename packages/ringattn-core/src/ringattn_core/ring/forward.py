# SPDX-License-Identifier: Apache-2.0
"""The forward pass round the ring: each hop sends the keys on and computes with those that are here."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ..contract import nonfinite, packing, rounding
from ..contract.merge import empty, with_sinks
from ..contract.protocol import Own, Partial
from . import batching, hops
from .blocks import Differentiable, Fixed, Ring, block, gathered
from .directions import Way, joined, split
from .sends import Wires, after, after_hop, aligned, packed, permuted, wire

Result = tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]
Partials = tuple[Partial, ...]
"""One partial result for every direction round the ring."""


@dataclasses.dataclass(frozen=True)
class _Pass:
    """What stays the same from hop to hop."""

    ring: Ring
    ways: Sequence[Way]
    kernel: Callable[[Any, Partial], Partial]
    dtype: Any
    own: Own | None

    def start(self, wires: Wires, inputs: Differentiable, dtype: Any, in_two: bool) -> Partials:
        """The empty partial results, with outputs of this dtype."""

        def nothing(way: Way, x: packing.Wire) -> Partial:
            first = block(self.ring, way.inputs, packing.from_wire(x, self.dtype), way.fixed, 0)
            return aligned(empty(first, dtype, in_two), inputs)

        return tuple(nothing(way, x) for way, x in zip(self.ways, wires, strict=True))

    def hop(self, wires: Wires, partials: Partials, offset: Any, shift: int | None) -> tuple[Wires, Partials]:
        """Sends the keys `shift` ranks on, and continues each partial result with the keys that are here.

        All sends are issued before the kernels of this hop, and after the kernels of the hop before.
        """
        following = wires
        if shift is not None:
            done = [partial.out for partial in partials if not partial.empty]
            wires = tuple(after(self.ring, x, done) for x in wires)
            following = permuted(self.ring, self.ways, wires, shift)
        found = []
        for way, x, partial in zip(self.ways, wires, partials, strict=True):
            kv, fixed = packing.from_wire(x, self.dtype), after_hop(way.fixed, partial.lse)
            visited = block(self.ring, way.inputs, kv, fixed, way.come(offset))
            found.append(self.kernel(dataclasses.replace(visited, own=self.own), partial))
        return following, tuple(found)

    def all_hops(self, wires: Wires, partials: Partials) -> Partials:
        """The partial results after every hop; a long ring is a scan and its last hop."""
        plan = self.ring.plan
        offsets, shifts = plan.offsets, (*plan.shifts, None)
        if len(offsets) > hops.UNROLLED and set(plan.shifts) == {1}:
            looped = len(offsets) - 1
            partials = tuple(dataclasses.replace(partial, empty=False) for partial in partials)
            (wires, partials), _ = jax.lax.scan(
                lambda carry, offset: (self.hop(*carry, offset, 1), None),
                (wires, partials),
                jnp.arange(looped, dtype=jnp.int32),
            )
            offsets, shifts = offsets[looped:], shifts[looped:]
        for offset, shift in zip(offsets, shifts, strict=True):
            wires, partials = self.hop(wires, partials, offset, shift)
        return partials


def forward(ring: Ring, inputs: Differentiable, fixed: Fixed, kept: bool = True) -> tuple[Result, tuple[Any, ...]]:
    """The result, and the residuals of the backward pass if they are to be `kept`."""
    dtype = inputs.q.dtype
    in_two = kept and rounding.in_two(dtype)
    final = inputs.sinks is None and finishes(ring) and (in_two or not kept)
    fixed = gathered(ring, fixed)
    q, bad = (inputs.q, None) if getattr(ring.kernel, "any_queries", False) else nonfinite.queries(inputs.q)
    ways = split(ring.plan.turns, dataclasses.replace(inputs, q=q), fixed)
    wires = tuple(wire(ring, packed(ring, way.inputs.k, way.inputs.v, poison=True)) for way in ways)
    own = _own(ring, inputs)
    over_ring = _Pass(ring, ways, batching.forward(ring.kernel), inputs.k.dtype, own)
    empty_partials = over_ring.start(wires, inputs, dtype if final else jnp.float32, final and in_two)
    partials = over_ring.all_hops(wires, empty_partials)
    partial = Partial(joined([x.out for x in partials], 2), joined([x.lse for x in partials], 1))
    partial = partial if bad is None else nonfinite.poisoned(partial, bad)
    whole = with_sinks(partial, sinks_of(inputs))
    rests = [x.rest for x in partials if x.rest is not None]
    own = own and own._replace(found=partials[0].found)
    kept_out = whole.out, joined(rests, 2) if rests else None
    return (whole.out.astype(dtype), whole.lse), (inputs, fixed, *kept_out, partial.lse, own)


def finishes(ring: Ring) -> bool:
    """Whether the kernel returns final results: on a ring of one rank there is nothing to continue or to sum."""
    return ring.plan.ranks == 1 and getattr(ring.kernel, "finishes", False)


def sinks_of(inputs: Differentiable) -> Float32[Array, "N n"] | None:
    """The sinks in float32; an infinite one is NaN, because it would hide every key."""
    if inputs.sinks is None:
        return None
    sinks = inputs.sinks.astype(jnp.float32)
    return jnp.where(jnp.isposinf(sinks), jnp.nan, sinks)


def _own(ring: Ring, inputs: Differentiable) -> Own | None:
    """The raw K and V, where the kernel wants to check them itself."""
    counts = getattr(ring.kernel, "counts", 0)
    if not counts or not finishes(ring):
        return None
    return Own(inputs.k, inputs.v, aligned(jnp.zeros(counts, jnp.int32), inputs))
