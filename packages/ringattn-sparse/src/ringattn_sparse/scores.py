# SPDX-License-Identifier: Apache-2.0
"""The index scores of a tile of queries and keys, and which of these keys each query sees."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

NO_INDEX: Final = 2**31 - 1
"""The index of padding, and the id of no block: larger than all others, so that no query sees it and it loses ties."""
FLOAT32: Final = jnp.finfo(jnp.float32)
Activation = Callable[[jax.Array], jax.Array] | None


def product(pattern: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum of two arrays, with the products and the sums in float32, whatever the dtype of the arrays."""
    return jnp.einsum(pattern, x, y, precision="highest", preferred_element_type=jnp.float32)


def products(q: Float[Array, "B t I D"], k: Float[Array, "B s G D"]) -> Float32[Array, "B I t s"]:
    """The products of each query head and the key of its group; the heads of a group are neighbours."""
    found = product("btghd,bsgd->bghts", q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]), k)
    return found.reshape(found.shape[0], -1, *found.shape[3:])


def relu(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`max(x, 0)`. NaN stays NaN: `jnp.maximum` loses it in Triton, and lost it here on CPUs."""
    return jnp.where(x <= 0, 0.0, x)


def activated(activation: Activation, x: jax.Array) -> jax.Array:
    return x if activation is None else activation(x)


def summed(
    x: Float32[Array, "B I t s"], weights: Float32[Array, "B t I"] | None, groups: int
) -> Float32[Array, "B G t s"]:
    """The sums over the heads of each group, of `x` times the weight of the head."""
    if weights is not None:
        x = x * jnp.swapaxes(weights, 1, 2)[..., None]
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:]).sum(2)


def not_nan(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`x` with the lowest finite number for NaN and -inf: -inf is kept for keys that the query does not see."""
    return jnp.where(x >= FLOAT32.min, x, FLOAT32.min)


def visible(
    causal: bool,
    q_index: Int32[Array, " t"],
    key_index: Int32[Array, " s"],
    q_ids: Int32[Array, "B t"] | None,
    kv_ids: Int32[Array, "B s"] | None,
) -> Bool[Array, "b 1 t s"]:
    """Which keys each query sees. A key with a negative index is padding of a tile, which no query sees."""
    seen = jnp.broadcast_to(key_index >= 0, (1, 1, q_index.size, key_index.size))
    if causal:
        seen &= (key_index[None] <= q_index[:, None])[None, None]
    if q_ids is not None and kv_ids is not None:
        seen &= ((q_ids[:, :, None] == kv_ids[:, None]) & (kv_ids >= 0)[:, None])[:, None]
    return seen


def indices_of_blocks(blocks: Int32[Array, " n"], size: int) -> Int32[Array, " keys"]:
    """The index of each key of these blocks; negative for the keys of block -1, which is padding."""
    return (blocks[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]).reshape(-1)


def flat(x: Any) -> Any:
    """The keys of blocks, `[B, blocks, size, ...]`, one after another: `[B, blocks * size, ...]`."""
    return x if x is None else x.reshape(x.shape[0], -1, *x.shape[3:])
