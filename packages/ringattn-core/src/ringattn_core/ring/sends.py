# SPDX-License-Identifier: Apache-2.0
"""How shards are sent round the ring, and what each send waits for."""

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
"""One packed array for each direction round the ring."""


def permuted(ring: Ring, directions: Sequence[Direction], wires: Wires, shift: int) -> Wires:
    """Sends each direction's array `shift` ranks along that direction; returns the arrays that arrive."""
    return tuple(_permuted(ring, x, each.signed(shift)) for each, x in zip(directions, wires, strict=True))


def _permuted(ring: Ring, x: jax.Array, shift: int) -> jax.Array:
    send = functools.partial(axes.shifted, axis=ring.axis, ranks=ring.plan.ranks, shift=shift)
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


def after_hop(fixed: Fixed, token: jax.Array) -> Fixed:
    """`fixed`, ordered after `token`: XLA must not compute the kernels' tile lists of all hops at once."""
    return dataclasses.replace(fixed, rank=ordering.tie_number_on_cpu(fixed.rank, token))


def wire(ring: Ring, kv: Packed) -> parcels.Wire:
    """K,V as the engine carries them from hop to hop: in their own dtype, or, for parcels, as `to_wire` has them.

    The barrier keeps XLA from packing it twice, once for the kernel and once for the send.
    """
    return parcels.to_wire(kv) if ring.plan.joint else jax.lax.optimization_barrier(kv)


def aligned(tree: Any, inputs: Differentiable) -> Any:
    """Marks new accumulators as varying over the mesh axes that the inputs vary over."""
    return align(tree, axes_of(inputs))
