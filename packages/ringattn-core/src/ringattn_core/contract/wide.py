# SPDX-License-Identifier: Apache-2.0
"""Lets ranks add up the gradient of an array that they share in float32, and round it once, to the array's dtype."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..placement import axes
from .varying import align

Move = Callable[[jax.Array], jax.Array]


def with_wide_gradient(x: jax.Array, move: Move | None = None, narrow: Any = None, axis: str | None = None) -> Any:
    """`move(x)`, by default `x`, in float32. Its gradient is rounded to the dtype of `x` only after `move`'s transpose.

    So sums of gradients between the result and `x`, or in `move`, are sums in float32. `move` is linear, holds no
    array, and may send along the mesh axis `axis`; it moves `x` in the dtype `narrow`, by default that of `x`.
    """
    if move is None:
        return x.astype(jnp.float32)
    dtype, narrow = x.dtype, x.dtype if narrow is None else narrow
    if axis is not None and axis not in axes.manual():
        # A `vmap` plays the ranks: nothing travels, and `back` could not use its axis name.
        return move(x.astype(jnp.float32))
    if axis is not None:
        x = align(x, axes.tracked() & {axis})  # the gradient varies over `axis`, so `x` must too
    wide = jax.typeof(x).update(dtype=jnp.dtype(jnp.float32))  # not in `back`, which would keep `x`

    def back(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        (found,) = jax.linear_transpose(move, wide)(gradient)
        return (found.astype(dtype),)

    moved = jax.custom_vjp(lambda x: move(x.astype(narrow)).astype(jnp.float32))
    moved.defvjp(lambda x: (moved(x), None), back)
    return moved(x)
