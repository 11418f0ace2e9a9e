# SPDX-License-Identifier: Apache-2.0
"""Makes one computation wait for another without a data dependence: a send for the kernel of the hop before.

Otherwise XLA may run all sends first, which needs memory for every shard at once and hides no transfer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching
from jaxtyping import Array, Float32, Int32, Shaped

from .varying import align, axes_of


def tie(x: Any, done: Any) -> Any:
    """Returns the pytree `x`; nothing that reads the result starts before all arrays in `done` are computed."""
    return _after_all(_ordered, x, done)


def tie_on_cpu(x: Any, done: Any) -> Any:
    """`tie` on CPU; elsewhere returns `x`. On CPU a send blocks, so overlap would take memory and hide nothing.

    If `x` is an index, arrays that are computed from it are allocated only after `done`.
    """
    return _after_all(_ordered_on_cpu, x, done)


def _after_all(ordered: Callable[[jax.Array, jax.Array], jax.Array], x: Any, done: Any) -> Any:
    return jax.tree.map(lambda x: functools.reduce(ordered, jax.tree.leaves(done), x), x)


def _ordered(x: Shaped[Array, "*x"], token: Shaped[Array, "*t"]) -> Shaped[Array, "*x"]:
    x, mesh = align(x, axes_of(x, token)), jax.sharding.get_abstract_mesh()
    # XLA cannot partition a kernel, so all axes must be manual. (A ring that `vmap` plays needs no order.)
    manual = bool(mesh.axis_names) and {*mesh.manual_axes} == {*mesh.axis_names}
    on_tpu = _by_kernel if manual else _by_barrier
    return jax.lax.platform_dependent(x, token, cpu=_by_bits, tpu=on_tpu, default=_by_barrier)


def _ordered_on_cpu(x: Shaped[Array, "*x"], token: Shaped[Array, "*t"]) -> Shaped[Array, "*x"]:
    x = align(x, axes_of(x, token))
    return jax.lax.platform_dependent(x, token, cpu=_by_bits, default=lambda x, _: x)


def _by_barrier(x: jax.Array, token: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier((x, token))[0]


def _by_bits(x: jax.Array, token: jax.Array) -> jax.Array:
    """Returns `x` after `token`: `x | 0`, with a zero that the compiler takes for a function of `token`.

    XLA on CPU drops optimization barriers (benchmarks/upstream/cpu_drops_barriers.py). It fuses the `|` into the
    operation that reads the result, without a copy; where another kernel reads it, `x` is copied.
    """
    if x.dtype == jnp.bool_:
        return x | _opaque_zero(token).astype(jnp.bool_)
    width = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, width) | _opaque_zero(token).astype(width)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def _by_kernel(x: jax.Array, token: jax.Array) -> jax.Array:
    """Passes `x` through an empty kernel that also takes `token`, without a copy of `x`.

    XLA on TPUs would drop an optimization barrier, but not a kernel.
    """
    (tied,) = _tie().bind(_heads_first(x), _heads_first(token))
    return align(_heads_first(tied), axes_of(x, token))


def _heads_first(x: jax.Array) -> jax.Array:
    """Swaps tokens and heads: XLA stores the arrays of a ring with heads first, and a kernel takes them as stored."""
    return jnp.swapaxes(x, -3, -2) if x.ndim > 3 else x


def _in_place(x: jax.Array, token: jax.Array) -> list[jax.Array]:
    from jax.experimental import pallas as pl  # imported on TPUs only: it takes longer than all of core

    tied = pl.pallas_call(
        lambda x, token, out: None,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        input_output_aliases={0: 0},
        name="ringattn_tie",
    )(x, token)
    return [tied]


def _batched(arrays: Any, axes: Any) -> Any:
    """The batching rule of the tie: one tie of the batched arrays orders every example."""
    return _tie().bind(*arrays), axes[:1]


@functools.cache
def _tie() -> Any:
    """The primitive of the empty kernel, made at the first call, as it needs `jax.extend`, which imports Pallas."""
    from .launch import launch_primitive

    # A program that is exported for several platforms is lowered for each, this branch included.
    elsewhere = dict.fromkeys(("cpu", "cuda", "rocm"), lambda x, token: [x])
    tie = launch_primitive("ringattn_tie", lambda x, token: [x], {"tpu": _in_place} | elsewhere)
    batching.primitive_batchers[tie] = _batched
    return tie


def later_than_its_send(x: Shaped[Array, "*x"]) -> Shaped[Array, "*x"]:
    """`x`, on NVIDIA GPUs a copy: a kernel that reads the copy starts after the copy, and a send of `x` before it.

    Without this the kernel may take all multiprocessors first, and the send waits until it ends (docs/kernels.md).
    """
    return jax.lax.platform_dependent(x, cuda=lambda x: _by_bits(x, x), default=lambda x: x)


def zeros(shape: tuple[int, ...], token: Shaped[Array, "*t"]) -> Float32[Array, "..."]:
    """Zeros of `shape` that take no memory before `token` is computed, and vary over the same mesh axes as `token`."""
    return jnp.broadcast_to(_opaque_zero(token).astype(jnp.float32), shape)


def _opaque_zero(token: jax.Array) -> Int32[Array, ""]:
    """Zero, computed from `token` in a way that no compiler simplifies."""
    bits = jax.lax.bitcast_convert_type(token[(0,) * token.ndim].astype(jnp.float32), jnp.int32)
    return jnp.minimum(bits & 1, 0)
