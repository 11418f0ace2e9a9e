# SPDX-License-Identifier: Apache-2.0
"""How K,V and the gradients of the hop before travel as one array, a parcel."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt16, UInt32

from ..contract.packing import Packed

Wire = Float[Array, "..."] | UInt16[Array, "..."] | UInt32[Array, "..."]
Parcel = UInt32[Array, " n"]


def joint(kernel: Any) -> bool:
    """Whether keys and gradients travel in one array: yes, unless the kernel sets `separate_sends`."""
    return not getattr(kernel, "separate_sends", False)


def to_wire(kv: Packed) -> Wire:
    """K,V as they travel in a parcel: 16-bit floats as integers, because XLA widens such floats on CPU."""
    return kv if kv.dtype == jnp.float32 else jax.lax.bitcast_convert_type(kv, jnp.uint16)


def from_wire(wire: Wire, dtype: Any) -> Packed:
    """The inverse of `to_wire`, bit for bit."""
    return wire if wire.dtype == dtype else jax.lax.bitcast_convert_type(wire, dtype)


def join(wire: Wire, gradients: Float32[Array, "..."]) -> Parcel:
    """A parcel: K,V and, behind them, their float32 gradients. It is one row of 32-bit integers, without gaps."""
    return jnp.concatenate([_integers(wire), _integers(gradients)])


def split(parcel: Parcel, wire: Any, gradients: Any) -> tuple[Wire, Float32[Array, "..."]]:
    """The inverse of `join`, bit for bit, for arrays of the shapes and dtypes of `wire` and `gradients`."""
    count = len(parcel) - gradients.size
    return _like(wire, parcel[:count]), _like(gradients, parcel[count:])


def _integers(x: Wire) -> Parcel:
    """The bits of `x` in a row of 32-bit integers; of two 16-bit numbers in each, the last may be missing."""
    row = x.reshape(-1)
    if x.dtype == jnp.uint16:
        row = jnp.pad(row, (0, len(row) % 2)).reshape(-1, 2)
    return jax.lax.bitcast_convert_type(row, jnp.uint32)


def _like(x: Any, integers: Parcel) -> Any:
    """The inverse of `_integers` for an array of the shape and dtype of `x`."""
    return jax.lax.bitcast_convert_type(integers, x.dtype).reshape(-1)[: x.size].reshape(x.shape)
