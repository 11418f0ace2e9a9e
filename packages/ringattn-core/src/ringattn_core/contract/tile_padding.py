# SPDX-License-Identifier: Apache-2.0
"""Pads an array to whole tiles."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def padded(x: Shaped[Array, "..."], length: int, axis: int, value: float = 0) -> Shaped[Array, "..."]:
    """`x` padded with `value` at the end of `axis` to `length`; `x` itself if it has that length."""
    widths = [(0, length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if length != x.shape[axis] else x
