# SPDX-License-Identifier: Apache-2.0
"""What travels round a ring, how it is sent, and what each send waits for."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..contract import ordering, packing
from ..placement import axes
from .plan import Level, Send


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keys:
    """Consecutive rows of a shard of keys and values, or their gradients: a pair, or packed in one array to travel."""

    kv: packing.Packed | tuple[jax.Array, jax.Array]
    first: int = dataclasses.field(default=0, metadata={"static": True})
    """The number of the first row in its shard."""

    @property
    def length(self) -> int:
        """The number of rows."""
        return jax.tree.leaves(self.kv)[0].shape[-3]

    def pair(self, key_dim: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values apart; `key_dim` is the head size of the keys."""
        return self.kv if isinstance(self.kv, tuple) else packing.unpack(self.kv, key_dim)


def packed(keys: Keys) -> Keys:
    """Keys as they travel. The barrier keeps XLA from packing them twice, for the kernel and for the send."""
    if not isinstance(keys.kv, tuple):
        return keys
    return dataclasses.replace(keys, kv=jax.lax.optimization_barrier(packing.pack_to_send(*keys.kv)))


def sent(level: Level, keys: Keys | None, send: Send | None) -> Keys | None:
    """The keys, or gradients, that arrive at this rank by `send`; `None` if there is nothing to send."""
    if keys is None or send is None:
        return None
    first, end = send.rows or (0, keys.length)
    if end - first < keys.length:
        keys = Keys(jax.tree.map(lambda x: jax.lax.slice_in_dim(x, first, end, axis=x.ndim - 3), keys.kv), first)
    return jax.tree.map(functools.partial(_permuted, level.axis, level.pairs(send.shift)), packed(keys))


def total(gradients: Keys, arriving: Keys | None) -> Keys:
    """The sum of `gradients` and those that arrive, which are of the same rows or of some of them."""
    if arriving is None:
        return gradients
    kv = gradients.kv
    others = arriving.pair(kv[0].shape[-1]) if isinstance(kv, tuple) else arriving.kv

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        if x.shape == y.shape:
            return x + y
        start = arriving.first - gradients.first
        return x.at[..., start : start + y.shape[-3], :, :].add(y)

    return dataclasses.replace(gradients, kv=jax.tree.map(add, kv, others))


def after(tie: Any, x: Any, tokens: Any) -> Any:
    """The arrays `x`, ordered after every token: nothing that reads them starts before all tokens are computed."""
    return jax.tree.map(lambda x: functools.reduce(tie, jax.tree.leaves(tokens), x), x)


def after_on_cpu(x: Any, tokens: Any) -> Any:
    """The arrays `x`, on CPU ordered after every token: a send blocks there."""
    return after(ordering.tie_on_cpu, x, tokens)


def _permuted(axis: tuple[str, ...], pairs: list[tuple[int, int]], x: jax.Array) -> jax.Array:
    send = functools.partial(axes.permuted, axis=axis, pairs=pairs)
    if x.dtype == jnp.float32:
        return send(x)

    def as_integers(x: jax.Array) -> jax.Array:
        """XLA on CPU would widen 16-bit floats."""
        return jax.lax.bitcast_convert_type(send(jax.lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

    if not axes.bound(axis):  # a branch of `platform_dependent` cannot use an axis name that is not bound
        return as_integers(x)
    return jax.lax.platform_dependent(x, tpu=send, default=as_integers)
