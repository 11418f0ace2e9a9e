# SPDX-License-Identifier: Apache-2.0
"""How a program orders work that has no data dependence: a send after the kernels of the hop before it.

XLA is free to run all sends first, which needs memory for every shard at once and hides no transfer.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Shaped


def tie(x: Shaped[Array, "*x"], token: Shaped[Array, "*t"]) -> Shaped[Array, "*x"]:
    """`x`, such that nothing that reads the result starts before `token` is computed."""
    return jax.lax.platform_dependent(x, token, cpu=_by_bits, default=_by_barrier)


def _by_barrier(x: jax.Array, token: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier((x, token))[0]


def _by_bits(x: jax.Array, token: jax.Array) -> jax.Array:
    """`x | 0`, where no compiler can see that the zero does not depend on `token`.

    XLA on CPU drops barriers before it schedules. Whatever reads the result fuses with this, so it costs no copy.
    """
    width = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, width) | _opaque_zero(token).astype(width)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def settled(x: Shaped[Array, "*x"], token: Shaped[Array, "*t"]) -> Shaped[Array, "*x"]:
    """`x`, on CPU not before `token`: there a send blocks, and work that runs beside it only takes memory."""
    return jax.lax.platform_dependent(x, token, cpu=_by_bits, default=lambda x, _: x)


def number(x: Int32[Array, ""], token: Shaped[Array, "*t"]) -> Int32[Array, ""]:
    """`x`, such that on CPU arrays computed from it take no memory before `token` is computed."""
    return jax.lax.platform_dependent(x, token, cpu=lambda x, token: x + _opaque_zero(token), default=lambda x, _: x)


def zeros(shape: tuple[int, ...], token: Shaped[Array, "*t"]) -> Float32[Array, "..."]:
    """Zeros that take no memory before `token` is computed, and vary over the mesh axes that it varies over."""
    return jnp.broadcast_to(_opaque_zero(token).astype(jnp.float32), shape)


def _opaque_zero(token: jax.Array) -> Int32[Array, ""]:
    """Zero, computed from `token` so that no compiler can tell."""
    bits = jax.lax.bitcast_convert_type(token[(0,) * token.ndim].astype(jnp.float32), jnp.int32)
    return jnp.minimum(bits & 1, 0)


def of(kernel: Any) -> Any:
    """The kernel's own `tie` where it has one."""
    return getattr(kernel, "tie", tie)
