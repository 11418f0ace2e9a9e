# SPDX-License-Identifier: Apache-2.0
"""Keeps a send from starting before the kernel of the previous hop is done.

XLA for TPUs drops barriers before it schedules, and then runs every send a hop too early, which takes the memory of one
more shard. XLA keeps the order of a kernel that takes both arrays, does nothing, and returns one of them in place.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.interpreters import batching
from jaxtyping import Array, Shaped
from ringattn_core.contract import ordering as core
from ringattn_core.contract.launch import launch_primitive
from ringattn_core.contract.varying import align, axes_of


def tie(x: Shaped[Array, "*x"], token: Shaped[Array, "*t"]) -> Shaped[Array, "*x"]:
    """`x`, ordered after `token`: nothing that reads the result starts before `token` is computed."""
    (tied,) = _tie.bind(_heads_first(x), _heads_first(token))
    return align(_heads_first(tied), axes_of(x, token))


def _heads_first(x: jax.Array) -> jax.Array:
    """Swaps tokens and heads: XLA stores the arrays of a ring with heads first, and a kernel takes them as stored."""
    return jnp.swapaxes(x, -3, -2) if x.ndim > 3 else x


def _in_place(x: jax.Array, token: jax.Array) -> list[jax.Array]:
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
    """Ties the whole arrays, which orders each example."""
    return _tie.bind(*arrays), axes[:1]


_tie: Final = launch_primitive(
    "ringattn_tpu_tie",
    lambda x, token: [x],
    {"cpu": lambda x, token: [core.tie(x, token)], "tpu": _in_place},
)
batching.primitive_batchers[_tie] = _batched
