# SPDX-License-Identifier: Apache-2.0
"""Gathers the keys and values of all ranks for one kernel, and adds up their gradients for the ranks that own them.

Unless `ring.gathers`, as with the strategy "ring", the functions return what they get.
"""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from ..contract import packing
from ..contract.call import Call
from ..placement import axes
from ..placement.layout import to_neighbours
from .blocks import Ring, all_gathered
from .directions import Location
from .sends import after

Pair = tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"]]


def whole_keys(ring: Ring, call: Call, location: Location, tokens: Sequence[jax.Array] = ()) -> Pair | packing.Packed:
    """Keys and values of all ranks in natural order, by one all-gather that starts after the arrays `tokens`.

    The backward pass gathers them again: keeping them from the forward pass would cost the memory of all shards.
    """
    if not ring.gathers:
        return call.key, call.value
    packed = after(ring, packing.pack_to_send(call.key, call.value), tokens)
    return all_gathered(ring, call.layout, location.rank, packed, packed.ndim - 3)


def own_gradients(ring: Ring, call: Call, location: Location, dk: jax.Array, dv: jax.Array) -> Pair:
    """The gradients of this rank's keys and values, summed over the queries of all ranks by one reduce-scatter."""
    if not ring.gathers:
        return dk, dv
    packed = packing.pack(dk, dv)
    tokens = packed.ndim - 3
    in_rank_order = to_neighbours(packed, call.layout, ring.ranks, tokens)
    summed = axes.scattered_sum(in_rank_order, ring.axis, ring.ranks, location.rank, tokens)
    return packing.unpack(summed, call.key.shape[-1])
