# SPDX-License-Identifier: Apache-2.0
"""Packs keys and values in one array, so that one permute carries both."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Pair = tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"]]
Packed = Float[Array, "2 B S K H"] | Float[Array, "B S K HHv"]


def pack(k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]) -> Packed:
    """Keys `k` and values `v`, or their gradients, as one array; `unpack` is the inverse.

    With equal shapes, the array is `k` and `v` along a new first axis; else they are concatenated along the last axis.
    XLA copies nothing where a kernel returned `k` and `v` as the halves of one array.
    """
    return jnp.stack([k, v]) if k.shape == v.shape else jnp.concatenate([k, v], -1)


def pack_to_send(k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]) -> Packed:
    """`pack` of keys `k` and values `v`, faster on GPUs. Must not be differentiated: its gradient is 0 on GPUs."""
    return jax.lax.platform_dependent(k, v, cuda=_in_pairs, default=pack)


def _in_pairs(k: jax.Array, v: jax.Array) -> jax.Array:
    """`pack` that copies pairs of 16-bit numbers as 32-bit integers, in 0.6 of the time on an H100 (docs/kernels.md).

    Must not be differentiated: JAX takes the derivative of a bit cast to be zero, so gradients would silently vanish.
    """
    if k.shape != v.shape or k.dtype.itemsize != 2 or k.shape[-1] % 2:
        return pack(k, v)
    pairs = [jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32) for x in (k, v)]
    return jax.lax.bitcast_convert_type(jnp.stack(pairs), k.dtype).reshape(2, *k.shape)


def unpack(kv: Packed | Pair, key_dim: int) -> Pair:
    """The keys and values in `kv`, packed or a pair; `key_dim` is the head size of the keys."""
    if isinstance(kv, tuple):
        return kv
    return (kv[0], kv[1]) if kv.ndim == 5 else (kv[..., :key_dim], kv[..., key_dim:])
