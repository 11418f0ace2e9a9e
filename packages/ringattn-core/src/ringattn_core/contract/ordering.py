# SPDX-License-Identifier: Apache-2.0
"""Orders work that has no data dependence: a send after the kernels of the hop before it.

XLA is free to run all sends first, which needs memory for every shard at once and hides no transfer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Shaped

from .varying import align, axes_of


def tie(x: Shaped[Array, "*x"], token: Shaped[Array, "*t"]) -> Shaped[Array, "*x"]:
    """`x`, ordered after `token`: nothing that reads the result starts before `token` is computed."""
    return _by_platform(x, token, lambda x, token: jax.lax.optimization_barrier((x, token))[0])


def _by_bits(x: jax.Array, token: jax.Array) -> jax.Array:
    """`x | 0`, where the zero depends on `token` as far as a compiler can see.

    XLA on CPU drops barriers before it schedules. What XLA compiles and reads the result fuses with this, so it costs
    no copy there; another kernel that reads it needs a copy.
    """
    width = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, width) | _opaque_zero(token).astype(width)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def tie_on_cpu(x: Shaped[Array, "*x"], token: Shaped[Array, "*t"]) -> Shaped[Array, "*x"]:
    """`x`, on CPU ordered after `token`: there a send blocks, so that work beside it saves no time and takes memory.

    If `x` is a number, such as an index, arrays that are computed from it are not allocated before `token` either.
    """
    return _by_platform(x, token, lambda x, _: x)


def later_than_its_send(x: Shaped[Array, "*x"]) -> Shaped[Array, "*x"]:
    """`x`, on NVIDIA GPUs copied: a kernel that reads the copy starts one copy later, and a send of `x` meanwhile.

    Without this the kernel may take all multiprocessors first, and the send waits until it ends (docs/kernels.md).
    """
    return jax.lax.platform_dependent(x, cuda=lambda x: _by_bits(x, x), default=lambda x: x)


def _by_platform(x: jax.Array, token: jax.Array, elsewhere: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Calls `_by_bits` on CPU, `elsewhere` on other platforms. The result varies over the mesh axes of both arrays."""
    return jax.lax.platform_dependent(align(x, axes_of(x, token)), token, cpu=_by_bits, default=elsewhere)


def zeros(shape: tuple[int, ...], token: Shaped[Array, "*t"]) -> Float32[Array, "..."]:
    """Zeros of `shape` that take no memory before `token` is computed, and vary over the same mesh axes as `token`."""
    return jnp.broadcast_to(_opaque_zero(token).astype(jnp.float32), shape)


def _opaque_zero(token: jax.Array) -> Int32[Array, ""]:
    """Zero, computed from `token` in a way that no compiler simplifies."""
    bits = jax.lax.bitcast_convert_type(token[(0,) * token.ndim].astype(jnp.float32), jnp.int32)
    return jnp.minimum(bits & 1, 0)


def of(kernel: Any) -> Any:
    """The function `tie` of `kernel`, or the `tie` of this module if the kernel has none."""
    return getattr(kernel, "tie", tie)
