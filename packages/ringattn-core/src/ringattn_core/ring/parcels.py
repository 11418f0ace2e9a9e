# SPDX-License-Identifier: Apache-2.0
"""How keys, values and the gradients behind them travel as one array: a parcel."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt16

from ..contract.packing import Packed

Wire = Float[Array, "..."] | UInt16[Array, "..."]


def joint(kernel: Any) -> bool:
    """Whether keys travel with gradients in one array: unless the kernel's `separate_sends` says otherwise."""
    return not getattr(kernel, "separate_sends", False)


def to_wire(kv: Packed) -> Wire:
    """K,V as it travels in a parcel: narrow floats as integers, because XLA widens floats on some platforms."""
    return kv if kv.dtype == jnp.float32 else jax.lax.bitcast_convert_type(kv, jnp.uint16)


def from_wire(wire: Wire, dtype: Any) -> Packed:
    """The inverse of `to_wire`, bit for bit."""
    return wire if wire.dtype == dtype else jax.lax.bitcast_convert_type(wire, dtype)


def join(wire: Wire, gradients: Float32[Array, "..."]) -> Wire:
    """A parcel: K,V and their float32 gradients as one array; `split` is the inverse.

    Beside integers the gradients travel as integers too, because half of a float32 is not a number that may be rounded.
    """
    if wire.dtype == jnp.float32:
        return jnp.stack([wire, gradients])
    return jnp.concatenate([wire[..., None], jax.lax.bitcast_convert_type(gradients, jnp.uint16)], -1)


def split(parcel: Wire) -> tuple[Wire, Float32[Array, "..."]]:
    if parcel.dtype == jnp.float32:
        return parcel[0], parcel[1]
    return parcel[..., 0], jax.lax.bitcast_convert_type(parcel[..., 1:], jnp.float32)
