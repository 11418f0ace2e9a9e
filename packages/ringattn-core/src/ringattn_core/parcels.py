# SPDX-License-Identifier: Apache-2.0
"""How keys, values and their gradients are packed, so that one permute carries them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

Packed = Float[Array, "2 B S K H"] | Float[Array, "B S K H+Hv"]


def pack(k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]) -> Packed:
    """K and V as one array; `unpack` is the inverse."""
    return jnp.stack([k, v]) if k.shape == v.shape else jnp.concatenate([k, v], -1)


def unpack(packed: Packed, key_dim: int) -> tuple[jax.Array, jax.Array]:
    if packed.ndim == 5:
        return packed[0], packed[1]
    return packed[..., :key_dim], packed[..., key_dim:]


def join(kv: Packed, gradients: Float32[Array, "..."]) -> jax.Array:
    """A parcel: K,V in their dtype and their float32 gradients, as one array; `split` is the inverse.

    Narrow dtypes travel as integers: a float32's halves are no numbers, and must arrive as they left.
    """
    if kv.dtype == jnp.float32:
        return jnp.stack([kv, gradients])
    halves = jax.lax.bitcast_convert_type(gradients, jnp.uint16)
    return jnp.concatenate([jax.lax.bitcast_convert_type(kv, jnp.uint16)[..., None], halves], -1)


def split(parcel: jax.Array, dtype: Any) -> tuple[Packed, jax.Array]:
    if dtype == jnp.float32:
        return parcel[0], parcel[1]
    kv = jax.lax.bitcast_convert_type(parcel[..., 0], dtype)
    return kv, jax.lax.bitcast_convert_type(parcel[..., 1:], jnp.float32)


def transported(send: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """What arrives of `x`, bit for bit: narrow floats travel as integers, because XLA widens them on some platforms."""
    if x.dtype in (jnp.bfloat16, jnp.float16):
        return jax.lax.bitcast_convert_type(send(jax.lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)
    return send(x)
