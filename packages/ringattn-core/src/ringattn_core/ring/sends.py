# SPDX-License-Identifier: Apache-2.0
"""The keys, values and gradients that travel round a ring, how they are sent, and what each send waits for."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..contract import ordering, packing
from ..placement import axes
from .plan import Level, Send


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


def sent(level: Level, kv: KV | None, send: Send | None) -> KV | None:
    """Sends `kv` along `level`, and returns what arrives at this rank; `None` if `kv` or `send` is `None`.

    If `send` names rows, `kv` must be a whole shard.
    """
    if kv is None or send is None:
        return None
    start, end = send.rows or (0, kv.length)
    if end - start < kv.length:
        axis = kv.token_axis
        kv = KV(jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, end, axis=axis), kv.arrays), start)
    return jax.tree.map(functools.partial(_permuted, level.axis, level.pairs(send.shift)), packed(kv))


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


def after(x: Any, done: Any) -> Any:
    """The arrays `x`, with an order: nothing that reads the result starts before all arrays in `done` are computed."""
    return _tied(ordering.tie, x, done)


def after_on_cpu(x: Any, done: Any) -> Any:
    """The arrays `x`, on CPU ordered after the arrays in `done`, because sends block there; unchanged elsewhere."""
    return _tied(ordering.tie_on_cpu, x, done)


def _tied(tie: Callable[..., Any], x: Any, done: Any) -> Any:
    return jax.tree.map(lambda x: functools.reduce(tie, jax.tree.leaves(done), x), x)


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
