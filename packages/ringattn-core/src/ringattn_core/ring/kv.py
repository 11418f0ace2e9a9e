# SPDX-License-Identifier: Apache-2.0
"""The keys and values that travel round a ring, and their gradients."""

import dataclasses
from typing import Any

import jax

from ..contract import packing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KV:
    """What travels round a ring: consecutive rows of a shard of keys and values, or of their gradients.

    `arrays` is a pair, or one array in which both are packed. With `expand`, it is a list of the arrays that travel in
    place of keys and values, or of their gradients.
    """

    arrays: Any
    start: int = dataclasses.field(default=0, metadata={"static": True})
    """The index of the first row in its shard; 0 for a whole shard."""
    received: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether a send or an all-gather has brought these rows. Otherwise they are this rank's own."""

    @property
    def length(self) -> int:
        """The number of rows."""
        return jax.tree.leaves(self.arrays)[0].shape[self.token_axis]

    @property
    def token_axis(self) -> int:
        """The axis of tokens of each array."""
        return 1 if isinstance(self.arrays, (tuple, list)) else self.arrays.ndim - 3


def packed(kv: KV) -> KV:
    """Packs a pair of keys and values in one array; returns `kv` itself if it is no pair.

    The barrier keeps XLA from packing them twice, for the kernel and for the send.
    """
    if not isinstance(kv.arrays, tuple):
        return kv
    return dataclasses.replace(kv, arrays=jax.lax.optimization_barrier(packing.pack_to_send(*kv.arrays)))


def total(dkv: KV, arriving: KV) -> KV:
    """`dkv` plus the gradients in `arriving`, which has all rows of `dkv` or some of them."""
    mine = dkv.arrays
    others = packing.unpack(arriving.arrays, mine[0].shape[-1]) if isinstance(mine, tuple) else arriving.arrays
    start = arriving.start - dkv.start
    rows = (*[slice(None)] * dkv.token_axis, slice(start, start + arriving.length))

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        # The barrier is for JAX 0.11 on GPUs. Without it, XLA fuses the update of float32 rows with the kernel before
        # it, and then refuses the fusion: "DUS target must be a fusion parameter".
        return x + y if x.shape == y.shape else jax.lax.optimization_barrier(x).at[rows].add(y)

    return dataclasses.replace(dkv, arrays=jax.tree.map(add, mine, others))
