# SPDX-License-Identifier: Apache-2.0
"""How shards travel round the ring, and what each send waits for."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..contract import ordering
from ..contract.packing import Packed
from ..contract.varying import align, axes_of
from ..placement import axes
from . import parcels
from .blocks import Differentiable, Fixed, Ring
from .directions import Direction

Wires = tuple[parcels.Wire, ...]
"""One packed array for every direction round the ring."""


def permuted(ring: Ring, directions: Sequence[Direction], wires: Wires, shift: int) -> Wires:
    """The arrays that arrive when every rank sends each direction's array `shift` ranks along that direction."""
    return tuple(_permuted(ring, x, each.signed(shift)) for each, x in zip(directions, wires, strict=True))


def _permuted(ring: Ring, x: jax.Array, shift: int) -> jax.Array:
    send = functools.partial(axes.shifted, axis=ring.axis, ranks=ring.plan.ranks, shift=shift)
    if x.dtype in (jnp.float32, jnp.uint16):
        return send(x)

    def as_integers(x: jax.Array) -> jax.Array:
        return parcels.from_wire(send(parcels.to_wire(x)), x.dtype)

    if not axes.bound(ring.axis):  # then a branch of `platform_dependent` may not name the axis
        return as_integers(x)
    return jax.lax.platform_dependent(x, tpu=send, default=as_integers)


def after(ring: Ring, x: jax.Array, tokens: Iterable[jax.Array]) -> jax.Array:
    """`x`, ordered after every token: nothing that reads the result starts before all of them are computed."""
    return functools.reduce(ordering.of(ring.kernel), tokens, x)


def after_hop(fixed: Fixed, token: jax.Array) -> Fixed:
    """`fixed`, ordered after `token`, so that a kernel's tables for one hop are not computed for all hops at once."""
    return dataclasses.replace(fixed, rank=ordering.number(fixed.rank, token))


def wire(ring: Ring, kv: Packed) -> parcels.Wire:
    """K,V as the engine carries it; it stays in the kernel's dtype where it never joins a parcel.

    The barrier keeps XLA from packing it twice, once for the kernel and once for the send.
    """
    return parcels.to_wire(kv) if ring.plan.joint else jax.lax.optimization_barrier(kv)


def aligned(tree: Any, inputs: Differentiable) -> Any:
    """Fresh accumulators, varying over the mesh axes that the inputs vary over."""
    return align(tree, axes_of(inputs))
