# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of DeepSeek V2 and V3: keys and values made of a small latent, of unequal sizes."""

import jax
import jax.numpy as jnp
from llama import project, rope, unit
from one_device import WIDTH, compare
from ringattn_core import ring_attention

HEADS, SIZE, ROTATED, LATENT = 8, 16, 8, 12  # DeepSeek V3: 128, 128, 64, 512
SHAPES = {"query": (WIDTH, HEADS, SIZE + ROTATED), "rotated_key": (WIDTH, 1, ROTATED), "latent": (WIDTH, LATENT)}
SHAPES |= {"key": (LATENT, HEADS, SIZE), "value": (LATENT, HEADS, SIZE), "out": (HEADS, SIZE, WIDTH)}


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, rotated = project(weights, x, "query", "rotated_key")
    query = jnp.concatenate([query[..., :SIZE], rope(query[..., SIZE:], positions, 10_000.0)], -1)
    key, value = project(weights, unit(x) @ weights["latent"], "key", "value")
    # All heads share the rotated part of their keys.
    rotated = jnp.broadcast_to(rope(rotated, positions, 10_000.0), (*key.shape[:3], ROTATED))
    out = ring_attention(query, jnp.concatenate([key, rotated], -1), value, causal=True, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="contiguous", strategy="ulysses")
