# SPDX-License-Identifier: Apache-2.0
"""The keys, values and gradients that travel round a ring, and how they are sent."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..contract import packing
from ..placement import axes
from .plan import Level


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
    """Whether a send has brought these rows. Otherwise they are this rank's own, or gathered from all ranks."""

    @property
    def length(self) -> int:
        """The number of rows."""
        return jax.tree.leaves(self.arrays)[0].shape[self.token_axis]

    @property
    def token_axis(self) -> int:
        """The axis of tokens of each array."""
        return 1 if isinstance(self.arrays, (tuple, list)) else self.arrays.ndim - 3

    def pair(self, key_dim: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values apart; `key_dim` is the head size of the keys."""
        return self.arrays if isinstance(self.arrays, tuple) else packing.unpack(self.arrays, key_dim)


def packed(kv: KV) -> KV:
    """Packs a pair of keys and values in one array; returns `kv` itself if it is no pair.

    The barrier keeps XLA from packing them twice, for the kernel and for the send.
    """
    if not isinstance(kv.arrays, tuple):
        return kv
    return dataclasses.replace(kv, arrays=jax.lax.optimization_barrier(packing.pack_to_send(*kv.arrays)))


def sent(level: Level, kv: KV | None, shift: int | None, rows: tuple[int, int] | None = None) -> KV | None:
    """Sends `kv` to the rank `shift` ranks onward, and returns what arrives; `None` if `kv` or `shift` is `None`.

    With `rows`, `kv` must be a whole shard, and only these rows are sent.
    """
    if kv is None or shift is None:
        return None
    start, end = rows or (0, kv.length)
    if end - start < kv.length:
        cut = functools.partial(jax.lax.slice_in_dim, start_index=start, limit_index=end, axis=kv.token_axis)
        kv = KV(jax.tree.map(cut, kv.arrays), start)
    pairs = axes.pairs_of_shift(level.ranks, shift)
    arriving = jax.tree.map(functools.partial(_permuted, level.axis, pairs), packed(kv))
    return dataclasses.replace(arriving, received=True)


def total(dkv: KV, arriving: KV | None) -> KV:
    """`dkv` plus the gradients in `arriving`, which has all rows of `dkv` or some of them; `None` adds nothing."""
    if arriving is None:
        return dkv
    mine = dkv.arrays
    others = arriving.pair(mine[0].shape[-1]) if isinstance(mine, tuple) else arriving.arrays
    start = arriving.start - dkv.start
    rows = (*[slice(None)] * dkv.token_axis, slice(start, start + arriving.length))

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y if x.shape == y.shape else x.at[rows].add(y)

    return dataclasses.replace(dkv, arrays=jax.tree.map(add, mine, others))


def _permuted(axis: tuple[str, ...], pairs: list[tuple[int, int]], x: jax.Array) -> jax.Array:
    send = functools.partial(axes.permuted, axis=axis, pairs=pairs)
    if x.dtype.itemsize != 2:
        return send(x)

    def as_integers(x: jax.Array) -> jax.Array:
        """Sends `x` as 16-bit integers. XLA on CPU sends bfloat16 as float32: see benchmarks/upstream/.

        On a GPU the bits are the same.
        """
        return jax.lax.bitcast_convert_type(send(jax.lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

    if not axes.bound(axis):  # a branch of `platform_dependent` cannot use an axis name that is not bound
        return as_integers(x)
    return jax.lax.platform_dependent(x, tpu=send, default=as_integers)
