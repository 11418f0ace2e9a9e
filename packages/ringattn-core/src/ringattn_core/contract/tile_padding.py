# SPDX-License-Identifier: Apache-2.0
"""How an array grows to whole tiles."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def padded(x: Shaped[Array, "..."], length: int, axis: int, value: float = 0) -> Shaped[Array, "..."]:
    """`x` with an axis of this length, `value` behind what was there; `x` itself where it has it."""
    widths = [(0, length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if length != x.shape[axis] else x
