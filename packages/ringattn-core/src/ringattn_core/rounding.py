# SPDX-License-Identifier: Apache-2.0
"""How an output is kept for the backward pass: as the caller has it, and beside it what rounding took.

Both together are as exact as what was rounded, to 2^-17, and take less memory, for the caller keeps the output anyway.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32


def in_two(dtype: Any) -> bool:
    """Whether an output of this dtype is kept so: bfloat16 alone has the range of float32 twice."""
    return dtype == jnp.bfloat16


def rest(out: Float32[Array, "*x"]) -> BFloat16[Array, "*x"]:
    """What rounding to bfloat16 takes from an output."""
    # Not a conversion there and back, which XLA may leave out.
    return (out - jax.lax.reduce_precision(out, exponent_bits=8, mantissa_bits=7)).astype(jnp.bfloat16)


def whole(out: Float[Array, "*x"], rest: Float[Array, "*x"] | None) -> Float32[Array, "*x"]:
    """The output with what rounding took from it, where that is kept."""
    exact = out.astype(jnp.float32)
    return exact if rest is None else exact + rest.astype(jnp.float32)
