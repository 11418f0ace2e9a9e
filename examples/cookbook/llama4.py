# SPDX-License-Identifier: Apache-2.0
"""Attention of Llama 4: chunks with RoPE in three layers of four; in the fourth, all keys without RoPE."""

import jax
import jax.numpy as jnp
from llama import SHAPES, project, rope, unit
from one_device import compare
from ringattn_core import ring_attention

CHUNK = 32  # Llama 4: 8192


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, chunked: bool, **ring) -> jax.Array:
    query, key, value = project(weights, x, "query", "key", "value")
    if chunked:
        query, key = unit(rope(query, positions)), unit(rope(key, positions))
    else:  # queries grow with their position, so that the softmax of a long sequence stays sharp
        query *= (1 + 0.1 * jnp.log(1 + (positions + 1) // CHUNK))[..., None, None]
    out = ring_attention(query, key, value, causal=True, chunk_size=CHUNK if chunked else None, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


def layers(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    return layer(weights, layer(weights, x, positions, chunked=True, **ring), positions, chunked=False, **ring)


if __name__ == "__main__":
    # A rank holds 64 tokens, two whole chunks, so the first layer sends nothing.
    compare(layers, SHAPES, {"dp": 2, "sp": 4}, layout="contiguous", strategy="auto")
