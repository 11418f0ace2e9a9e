# SPDX-License-Identifier: Apache-2.0
"""Which key heads a rank's query heads read, if every rank of the caller's own `shard_map` holds all key heads."""

import math

import jax
import jax.numpy as jnp

from ..placement import axes


def own_key_heads(query: jax.Array, x: jax.Array, head_axes: tuple[str, ...]) -> jax.Array:
    """Selects the key heads that this rank's query heads read, if every rank holds all of them; else returns `x`.

    Under `check_vma=True` JAX says whether every rank holds all key heads. Otherwise this assumes so only if their
    number does not divide the number of this rank's query heads. Every head of the result serves
    equally many query heads.
    """
    ranks, heads, given = axes.size(head_axes, "head_axis_name"), query.shape[2], x.shape[2]
    over = axes.tracked() & set(head_axes)
    whole = over & axes.varying(query) and not over & axes.varying(x) if over else heads % given
    if not whole or heads * ranks % given:
        return x
    group = heads * ranks // given
    run = math.gcd(heads, group)
    first = axes.coordinate(head_axes) * heads
    return jnp.take(x, (first + jnp.arange(0, heads, run)) // group, axis=2)
