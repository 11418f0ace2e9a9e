# SPDX-License-Identifier: Apache-2.0
"""Attention of Llama with keys and values of 8 bits on their way round the ring, and a scale for each token and head.

Rounding has no derivative, and arrays of integers get no gradient: keys and values are differentiated through their
scales only, so that all but the largest number of each head get the gradient 0. Queries get the whole gradient of
attention to the rounded keys. So this is for prefilling, for evaluation, and for adapters that change queries only. It
is no straight-through estimator: to train keys and values, send them whole.
"""

import jax
import jax.numpy as jnp
from llama import SHAPES, project, rope
from one_device import compare
from ringattn_core import ring_attention


def rounded(x: jax.Array) -> dict[str, jax.Array]:
    """`x` as integers from -127 to 127, and a scale for each token and head."""
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    return {"integers": jnp.round(x / jnp.maximum(scale, 1e-30)).astype(jnp.int8), "scale": scale}


def key_and_value(x: dict[str, jax.Array], _: None) -> tuple[jax.Array, jax.Array]:
    key, value = jnp.split(x["integers"] * x["scale"], 2, axis=2)
    return key, value


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, key, value = project(weights, x, "query", "key", "value")
    both = rounded(jnp.concatenate([rope(key, positions), value], axis=2))
    out = ring_attention(rope(query, positions), both, causal=True, expand=key_and_value, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    # Where a mesh and one device differ in the last bit, they may round to neighbouring integers.
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="zigzag", tolerance=1e-2)
