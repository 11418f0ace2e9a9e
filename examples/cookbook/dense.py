# SPDX-License-Identifier: Apache-2.0
"""Attention and choices with an entry for each pair of a query and a key, which recipes are compared with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from one_device import LENGTH

CAUSAL = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    seen: Bool[Array, "*m"],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T S"]]:
    """The output, and the weight of each pair. `seen` broadcasts to `[B, N, T, S]`; without a key, the output is 0."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -1e9), -1), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, value), weights


def highest(scores: Float[Array, "B G T S"], size: int) -> Float[Array, "B G T blocks"]:
    """The highest score in each block of keys, of those that a causal mask lets a query see."""
    visible = jnp.where(CAUSAL, scores, -jnp.inf)
    return visible.reshape(*visible.shape[:3], -1, size).max(-1)


def chosen(
    scores: Float[Array, "B G T blocks"], count: int, heads: int, forced: tuple[int, int] = (0, 0)
) -> Bool[Array, "B N T S"]:
    """Which keys each head sees when its group chooses the `count` best blocks up to a query's own, as in `select`."""
    block = jnp.arange(scores.shape[-1])
    size = LENGTH // block.size
    behind = jnp.arange(LENGTH)[:, None] // size - block
    must = (block < forced[0]) | (behind < forced[1])
    scores = jnp.where(behind >= 0, jnp.where(must, jnp.inf, scores), -jnp.inf)
    place = jnp.argsort(jnp.argsort(-scores, -1, stable=True), -1)  # of equal scores, the first block comes first
    keys = jnp.repeat(place < count, size, -1) & CAUSAL
    return jnp.repeat(keys, heads // scores.shape[1], 1)
