# SPDX-License-Identifier: Apache-2.0
"""How a kernel that finishes gives an output to the backward pass: as the caller has it, and what rounding took.

Both together are as exact as 2^-17, and take less memory than float32, for the caller keeps the output anyway.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32


def in_two(dtype: Any) -> bool:
    """Whether an output of this dtype is given so: bfloat16 alone has the range of float32 twice."""
    return dtype == jnp.bfloat16


def rest(exact: Float32[Array, "*x"]) -> BFloat16[Array, "*x"]:
    """What rounding to bfloat16 takes from an output."""
    return (exact - _widened(exact.astype(jnp.bfloat16))).astype(jnp.bfloat16)


def whole(out: Float[Array, "*x"], rest: Float[Array, "*x"] | None) -> Float32[Array, "*x"]:
    """The output with what rounding took from it, where that is given."""
    return out.astype(jnp.float32) if rest is None else _widened(out) + rest.astype(jnp.float32)


def _widened(x: BFloat16[Array, "*x"]) -> Float32[Array, "*x"]:
    """The same numbers, by their bits: of a conversion there and back XLA makes none, and nothing is rounded then."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)
