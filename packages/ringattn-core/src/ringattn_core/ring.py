# SPDX-License-Identifier: Apache-2.0
"""The engine: drives any block kernel round the ring, forward and backward, under one custom_vjp."""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from . import batching, finite, parcels, tie
from .blocks import Differentiable, Fixed, Ring, block, gathered, source
from .hops import parcel_sends
from .layout import put_columns
from .merge import empty, with_sinks
from .protocol import Partial
from .varying import align, axes_of

UNROLLED: Final = 8
"""Hops up to which the ring is unrolled: XLA overlaps an unrolled ring best; beyond, a scan keeps programs small."""

Result = tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(ring: Ring, inputs: Differentiable, fixed: Fixed) -> Result:
    """`(out, lse)` of this rank's queries against the keys of all ranks."""
    return _forward(ring, inputs, fixed)[0]


def _forward(ring: Ring, inputs: Differentiable, fixed: Fixed) -> tuple[Result, tuple[Any, ...]]:
    fixed = gathered(ring, fixed)
    q, bad = finite.queries(inputs.q)
    wire = parcels.to_wire(finite.keys_and_values(inputs.k, inputs.v, poison=True))
    kernel, tied, dtype = batching.forward(ring.kernel), tie.of(ring.kernel), inputs.k.dtype
    partial = _aligned(ring, empty(block(ring, inputs, q, parcels.from_wire(wire, dtype), fixed, 0)), inputs)

    def hop(wire: parcels.Wire, partial: Partial, offset: Any, shift: int | None) -> tuple[parcels.Wire, Partial]:
        # The send is issued before the kernel, and not before the kernel of the last hop is done.
        wire = wire if shift is None or partial.empty else tied(wire, partial.out)
        following = wire if shift is None else _send(ring, wire, shift)
        kv = parcels.from_wire(wire, dtype)
        return following, kernel(block(ring, inputs, q, kv, _at(fixed, partial.lse), offset), partial)

    offsets, shifts = ring.plan.offsets, (*ring.plan.shifts, None)
    if len(offsets) > UNROLLED and set(ring.plan.shifts) == {1}:
        looped = len(offsets) - 1
        partial = dataclasses.replace(partial, empty=False)
        (wire, partial), _ = jax.lax.scan(
            lambda carry, offset: (hop(*carry, offset, 1), None), (wire, partial), jnp.arange(looped, dtype=jnp.int32)
        )
        offsets, shifts = offsets[looped:], shifts[looped:]
    for offset, shift in zip(offsets, shifts, strict=True):
        wire, partial = hop(wire, partial, offset, shift)
    partial = finite.poisoned(partial, bad)
    whole = with_sinks(partial, _sinks(inputs))
    return (whole.out.astype(inputs.q.dtype), whole.lse), (inputs, fixed, whole.out, partial.lse)


def _backward(ring: Ring, residuals: tuple[Any, ...], cotangents: Result) -> tuple[Differentiable, None]:
    inputs, fixed, out, keys_lse = residuals
    dout, dlse = cotangents
    sinks = _sinks(inputs)
    lse = with_sinks(Partial(out, keys_lse), sinks).lse
    seen = ~jnp.isneginf(keys_lse)
    dout = jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], dout, 0)
    # Not an einsum: XLA on a GPU makes as many products of vectors of that as there are rows.
    delta = jnp.swapaxes((dout.astype(jnp.float32) * out).sum(-1), 1, 2) - dlse
    dsinks = None
    if sinks is not None:
        share = jnp.exp(sinks[:, None, :] - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None])
        dsinks = -jnp.einsum("bnt,bnts->ns", delta, share, precision="highest")
    sums = _gradients(ring, inputs, fixed, *finite.cotangents(dout, lse, delta, seen))
    dk, dv = parcels.unpack(sums["kv"], inputs.q.shape[-1])
    gradients = Differentiable(sums["q"], dk, dv, dsinks, sums["bias"], sums["slopes"])
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, inputs), None


attend.defvjp(_forward, _backward)


def _gradients(
    ring: Ring, inputs: Differentiable, fixed: Fixed, dout: jax.Array, lse: jax.Array, delta: jax.Array
) -> dict[str, Any]:
    """The sums over all hops. Each parcel brings the next keys, and the gradients of the keys that left before."""
    q, _ = finite.queries(inputs.q)
    kernel, tied, dtype = batching.backward(ring.kernel), tie.of(ring.kernel), inputs.k.dtype
    zeros = {"q": q, "bias": inputs.bias, "slopes": inputs.slopes}
    sums = {name: None if x is None else jnp.zeros(x.shape, jnp.float32) for name, x in zeros.items()}
    sums = _aligned(ring, sums, inputs)

    def compute(kv: parcels.Packed, sums: dict[str, Any], offset: Any) -> tuple[jax.Array, dict[str, Any]]:
        visited = block(ring, inputs, q, kv, _at(fixed, sums["q"]), offset)
        found = kernel(visited, dout, lse, delta, sums["q"])
        return parcels.pack(found.dk, found.dv), _added(ring, sums, found, source(ring, fixed, offset))

    def hop(
        wire: parcels.Wire, behind: Any, sums: dict[str, Any], offset: Any, onward: int | None, back: int | None
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Works on the keys of `wire` while they go `onward` and the gradients `behind` them follow by `back`."""
        wire = tied(wire, sums["q"])
        sends = parcel_sends(onward, back)
        if len(sends) == 1 and sends[0].keys and sends[0].gradients:
            following, arrived = parcels.split(_send(ring, parcels.join(wire, behind), sends[0].shift))
        else:
            following = None if onward is None else _send(ring, wire, onward)
            arrived = None if back is None else _send(ring, tied(behind, sums["q"]), back)
        for came in (following, arrived):
            sums = sums if came is None else {**sums, "q": tie.settled(sums["q"], came)}
        mine, sums = compute(parcels.from_wire(wire, dtype), sums, offset)
        return following, mine if arrived is None else mine + arrived, sums

    def own(token: jax.Array) -> parcels.Wire:
        """Packed when it is needed, twice, and not kept between."""
        kv = finite.keys_and_values(tied(inputs.k, token), tied(inputs.v, token), poison=False)
        return parcels.to_wire(kv)

    behind = None
    offsets, shifts = ring.plan.offsets[1:], ring.plan.shifts
    if offsets:
        wire = _send(ring, own(dout), shifts[0])
        onward = (*shifts[1:], None)
        wire, behind, sums = hop(wire, behind, sums, offsets[0], onward[0], None)
        steps = list(zip(offsets[1:], onward[1:], shifts[1:], strict=True))
        if len(steps) > UNROLLED and set(shifts) == {1}:
            (wire, behind, sums), _ = jax.lax.scan(
                lambda carry, offset: (hop(*carry, offset, 1, 1), None),
                (wire, behind, sums),
                jnp.asarray(offsets[1:-1]),
            )
            steps = steps[-1:]
        for offset, onward, back in steps:
            wire, behind, sums = hop(wire, behind, sums, offset, onward, back)
    home = ring.plan.homeward
    _, total, sums = hop(own(sums["q"]), behind, sums, 0, None, home[0].shift if home else None)
    return {**sums, "kv": total}


def _added(ring: Ring, sums: dict[str, Any], found: Any, origin: Any) -> dict[str, Any]:
    """The sums with what one hop found; every hop has columns of the bias for itself."""
    bias, slopes = sums["bias"], sums["slopes"]
    if bias is not None:
        bias = put_columns(bias, found.dbias, ring.layout, ring.plan.ranks, origin)
    if slopes is not None:
        slopes = slopes + found.dslopes.reshape(slopes.shape)
    return {"q": found.dq, "bias": bias, "slopes": slopes}


def _sinks(inputs: Differentiable) -> Float32[Array, "N n"] | None:
    if inputs.sinks is None:
        return None
    sinks = inputs.sinks.astype(jnp.float32)
    return jnp.where(jnp.isposinf(sinks), jnp.nan, sinks)


def _at(fixed: Fixed, token: jax.Array) -> Fixed:
    """The same for one hop: the tables that a kernel makes of it are not made for all hops at the start."""
    return dataclasses.replace(fixed, rank=tie.number(fixed.rank, token))


def _send(ring: Ring, x: jax.Array, shift: int) -> jax.Array:
    ranks = ring.plan.ranks
    return jax.lax.ppermute(x, ring.axis, [(rank, (rank + shift) % ranks) for rank in range(ranks)])


def _aligned(ring: Ring, tree: Any, inputs: Differentiable) -> Any:
    """Fresh accumulators vary over whatever the inputs vary over."""
    return align(tree, axes_of(inputs))
