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
    """A parcel: K,V and their float32 gradients as one array, one behind the other; `split` is the inverse.

    If K,V travel as 16-bit integers, the gradients travel as two arrays of them: the high halves and the low halves of
    their bits. No two axes become one, so what XLA has split over other mesh axes stays split.
    """
    if wire.dtype == jnp.float32:
        return jnp.stack([wire, gradients])
    bits = jax.lax.bitcast_convert_type(gradients, jnp.uint32)
    return jnp.stack([wire, (bits >> jnp.uint32(16)).astype(jnp.uint16), bits.astype(jnp.uint16)])


def split(parcel: Wire) -> tuple[Wire, Float32[Array, "..."]]:
    if parcel.dtype == jnp.float32:
        return parcel[0], parcel[1]
    high, low = parcel[1].astype(jnp.uint32), parcel[2].astype(jnp.uint32)
    return parcel[0], jax.lax.bitcast_convert_type((high << jnp.uint32(16)) | low, jnp.float32)
