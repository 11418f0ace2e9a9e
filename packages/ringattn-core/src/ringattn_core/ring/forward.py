# SPDX-License-Identifier: Apache-2.0
"""The forward pass round the ring: each hop sends the keys on and computes with the keys that are here."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ..contract import packing
from ..contract.merge import log_sum_exp, with_sinks
from ..contract.protocol import Block, Partial
from ..placement.padding import cleaned
from . import batching, hops, parcels
from .blocks import Differentiable, Fixed, Ring, block, gathered
from .directions import Direction, joined, split
from .sends import Wires, after, after_hop, permuted, wire

Result = tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]
Partials = tuple[Partial, ...]
"""One partial result for every direction round the ring."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the backward pass reads: `out` as the caller has it, and `lse` counted from `shift`. `fixed` is gathered."""

    inputs: Differentiable
    fixed: Fixed
    out: Float[Array, "B T N Hv"]
    lse: Float32[Array, "B N T"]
    shift: Float32[Array, "B N T"] | None


def forward(ring: Ring, inputs: Differentiable, fixed: Fixed) -> tuple[Result, Residuals]:
    """The result and the residuals."""
    inputs, fixed = _without_padding(inputs, fixed), gathered(ring, fixed)
    kernel = batching.forward(ring.kernel)
    if ring.plan.ranks == 1:
        alone = block(ring, inputs, (inputs.k, inputs.v), fixed, 0)
        partial = kernel(dataclasses.replace(alone, final=inputs.sinks is None), None)
    else:
        directions = split(ring.plan.signs, inputs, fixed)
        partial = _joined(_Pass(ring, directions, kernel, inputs.k.dtype).all_hops())
    partial = with_sinks(partial, sinks_of(inputs))
    out = partial.out.astype(inputs.q.dtype)
    return (out, log_sum_exp(partial)), Residuals(inputs, fixed, out, partial.lse, partial.shift)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """What stays the same from hop to hop."""

    ring: Ring
    directions: Sequence[Direction]
    kernel: Callable[[Block, Partial | None], Partial]
    dtype: Any

    def all_hops(self) -> Partials:
        """The partial results after every hop. On a long ring all hops but the first and the last are a scan."""
        offsets, shifts = self.ring.plan.offsets, (*self.ring.plan.shifts, None)
        wires = tuple(wire(self.ring, packing.pack(each.inputs.k, each.inputs.v)) for each in self.directions)
        wires, partials = self.hop(wires, None, offsets[0], shifts[0])
        offsets, shifts = offsets[1:], shifts[1:]
        if len(offsets) >= hops.UNROLLED and set(self.ring.plan.shifts) == {1}:
            (wires, partials), _ = jax.lax.scan(
                lambda carry, offset: (self.hop(*carry, offset, 1), None),
                (wires, partials),
                jnp.asarray(offsets[:-1], jnp.int32),
            )
            offsets, shifts = offsets[-1:], shifts[-1:]
        for offset, shift in zip(offsets, shifts, strict=True):
            wires, partials = self.hop(wires, partials, offset, shift)
        return partials

    def hop(self, wires: Wires, partials: Partials | None, offset: Any, shift: int | None) -> tuple[Wires, Partials]:
        """Sends the keys `shift` ranks on, and continues each partial result with the keys that are here.

        Every send is issued before the kernels of this hop and after the kernels of the hop before.
        """
        following = wires
        if shift is not None:
            done = [partial.out for partial in partials or ()]
            wires = tuple(after(self.ring, x, done) for x in wires)
            following = permuted(self.ring, self.directions, wires, shift)
        before = partials or [None] * len(wires)
        made = [self.visit(*each, offset) for each in zip(self.directions, wires, before, strict=True)]
        return following, tuple(made)

    def visit(self, direction: Direction, x: parcels.Wire, partial: Partial | None, offset: Any) -> Partial:
        """The partial result of one direction, continued with the keys in `x`."""
        fixed = direction.fixed if partial is None else after_hop(direction.fixed, partial.lse)
        kv = parcels.from_wire(x, self.dtype)
        return self.kernel(block(self.ring, direction.inputs, kv, fixed, direction.signed(offset)), partial)


def sinks_of(inputs: Differentiable) -> Float32[Array, "N n"] | None:
    """The sinks in float32; an infinite one is NaN, because it would hide every key."""
    if inputs.sinks is None:
        return None
    sinks = inputs.sinks.astype(jnp.float32)
    return jnp.where(jnp.isposinf(sinks), jnp.nan, sinks)


def _without_padding(inputs: Differentiable, fixed: Fixed) -> Differentiable:
    """The inputs with zeros in the padding; `fixed` holds the ids of this rank's own keys."""
    k, v = (cleaned(x, fixed.kv_segments) for x in (inputs.k, inputs.v))
    return dataclasses.replace(inputs, q=cleaned(inputs.q, fixed.q_segments), k=k, v=v)


def _joined(partials: Partials) -> Partial:
    """The partial result of all heads."""
    out, lse = joined([x.out for x in partials], 2), joined([x.lse for x in partials], 1)
    shifts = [x.shift for x in partials if x.shift is not None]
    return Partial(out, lse, joined(shifts, 1) if shifts else None)
