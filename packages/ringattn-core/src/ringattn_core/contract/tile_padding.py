# SPDX-License-Identifier: Apache-2.0
"""Pads an array to whole tiles."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def padded(x: Shaped[Array, "..."], length: int, axis: int, value: float | None = 0) -> Shaped[Array, "..."]:
    """Pads `x` at the end of `axis` to `length`, with `value`, or with copies of its last entry if that is `None`.

    Returns `x` itself if it has that length already.
    """
    if length == x.shape[axis]:
        return x
    widths = [(0, length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, mode="edge") if value is None else jnp.pad(x, widths, constant_values=value)
