# SPDX-License-Identifier: Apache-2.0
"""How shards are sent round the ring, and what each send waits for."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from ..contract import ordering
from ..contract.packing import Packed
from ..placement import axes
from . import parcels
from .blocks import Ring
from .directions import Direction

Wires = tuple[parcels.Wire, ...]
"""One packed array for each direction round the ring."""


def permuted(ring: Ring, directions: Sequence[Direction], wires: Wires, shift: int, outer: bool = False) -> Wires:
    """Sends each array `shift` steps in its direction, along the inner or outer ring; returns the arrays received."""
    return tuple(_permuted(ring, x, each.sign * shift, outer) for each, x in zip(directions, wires, strict=True))


def _permuted(ring: Ring, x: jax.Array, shift: int, outer: bool) -> jax.Array:
    send = functools.partial(axes.permuted, axis=ring.axis, pairs=ring.plan.pairs(shift, outer))
    if x.dtype in (jnp.float32, jnp.uint16):
        return send(x)

    def as_integers(x: jax.Array) -> jax.Array:
        return parcels.from_wire(send(parcels.to_wire(x)), x.dtype)

    if not axes.bound(ring.axis):  # a branch of `platform_dependent` cannot use an axis name that is not bound
        return as_integers(x)
    return jax.lax.platform_dependent(x, tpu=send, default=as_integers)


def after(ring: Ring, x: jax.Array, tokens: Iterable[jax.Array]) -> jax.Array:
    """`x`, ordered after every token: nothing that reads the result starts before all of them are computed."""
    return functools.reduce(ordering.of(ring.kernel), tokens, x)


def after_hop(direction: Direction, token: jax.Array) -> Direction:
    """`direction` with a rank that, on CPU, XLA reads only after `token` is computed.

    Positions and tile lists derive from the rank. Without this order XLA computes those of all hops at once.
    """
    rank = ordering.tie_on_cpu(direction.location.rank, token)
    return dataclasses.replace(direction, location=dataclasses.replace(direction.location, rank=rank))


def wire(ring: Ring, kv: Packed) -> parcels.Wire:
    """K,V as the engine carries them from hop to hop: in their own dtype, or, for parcels, as `to_wire` has them.

    The barrier keeps XLA from packing it twice, once for the kernel and once for the send.
    """
    return parcels.to_wire(kv) if ring.plan.joint else jax.lax.optimization_barrier(kv)
