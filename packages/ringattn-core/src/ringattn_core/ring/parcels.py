# SPDX-License-Identifier: Apache-2.0
"""How K,V and the gradients of the hop before travel as one array, a parcel."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt16

from ..contract.packing import Packed

Wire = Float[Array, "..."] | UInt16[Array, "..."]


def joint(kernel: Any) -> bool:
    """Whether keys and gradients travel in one array: yes, unless the kernel sets `separate_sends`."""
    return not getattr(kernel, "separate_sends", False)


def to_wire(kv: Packed) -> Wire:
    """K,V as they travel in a parcel: 16-bit floats as integers, because XLA widens such floats on CPU."""
    return kv if kv.dtype == jnp.float32 else jax.lax.bitcast_convert_type(kv, jnp.uint16)


def from_wire(wire: Wire, dtype: Any) -> Packed:
    """The inverse of `to_wire`, bit for bit."""
    return wire if wire.dtype == dtype else jax.lax.bitcast_convert_type(wire, dtype)


def join(wire: Wire, gradients: Float32[Array, "..."]) -> Wire:
    """A parcel: K,V and their float32 gradients as one array; `split` is the inverse.

    If K,V travel as 16-bit integers, each float32 of the gradients travels as two of them, bit for bit.
    """
    if wire.dtype == jnp.float32:
        return jnp.stack([wire, gradients])
    return jnp.concatenate([wire[..., None], jax.lax.bitcast_convert_type(gradients, jnp.uint16)], -1)


def split(parcel: Wire) -> tuple[Wire, Float32[Array, "..."]]:
    if parcel.dtype == jnp.float32:
        return parcel[0], parcel[1]
    return parcel[..., 0], jax.lax.bitcast_convert_type(parcel[..., 1:], jnp.float32)
