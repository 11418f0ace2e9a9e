# SPDX-License-Identifier: Apache-2.0
"""How keys, values and their gradients are packed, so that one permute carries them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt16

Packed = Float[Array, "2 B S K H"] | Float[Array, "B S K HHv"]
Wire = Float[Array, "..."] | UInt16[Array, "..."]


def pack(k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"]) -> Packed:
    """K and V as one array; `unpack` is the inverse."""
    if k.shape != v.shape:
        return jnp.concatenate([k, v], -1)
    # A selection: XLA on a GPU writes it at nearly twice the rate of a concatenation.
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, (2, *[1] * k.ndim), 0) == 0, k[None], v[None])


def unpack(packed: Packed, key_dim: int) -> tuple[jax.Array, jax.Array]:
    if packed.ndim == 5:
        return packed[0], packed[1]
    return packed[..., :key_dim], packed[..., key_dim:]


def joint(kernel: Any) -> bool:
    """Whether keys travel with gradients in one array: unless the kernel's `separate_sends` says otherwise."""
    return not getattr(kernel, "separate_sends", False)


def to_wire(kv: Packed) -> Wire:
    """K,V as it travels in a parcel: narrow floats as integers, because XLA widens them on some platforms."""
    return kv if kv.dtype == jnp.float32 else jax.lax.bitcast_convert_type(kv, jnp.uint16)


def from_wire(wire: Wire, dtype: Any) -> Packed:
    """The inverse of `to_wire`, bit for bit."""
    return wire if wire.dtype == dtype else jax.lax.bitcast_convert_type(wire, dtype)


def join(wire: Wire, gradients: Float32[Array, "..."]) -> Wire:
    """A parcel: K,V and their float32 gradients as one array; `split` is the inverse.

    Beside integers the gradients are integers too: the halves of a float32 are no numbers, and arrive as they left.
    """
    if wire.dtype == jnp.float32:
        return jnp.stack([wire, gradients])
    return jnp.concatenate([wire[..., None], jax.lax.bitcast_convert_type(gradients, jnp.uint16)], -1)


def split(parcel: Wire) -> tuple[Wire, Float32[Array, "..."]]:
    if parcel.dtype == jnp.float32:
        return parcel[0], parcel[1]
    return parcel[..., 0], jax.lax.bitcast_convert_type(parcel[..., 1:], jnp.float32)
