# SPDX-License-Identifier: Apache-2.0
"""Attention of Qwen3-Next: a gate on the output, RoPE on a quarter of each head, few key heads."""

import jax
import jax.numpy as jnp
from llama import project, rope, unit
from one_device import WIDTH, compare
from ringattn_core import ring_attention

HEADS, KEY_HEADS, SIZE, ROTATED = 8, 2, 32, 8  # Qwen3-Next 80B: 16, 2, 256, 64
SHAPES = {"query": (WIDTH, HEADS, SIZE), "gate": (WIDTH, HEADS, SIZE), "out": (HEADS, SIZE, WIDTH)}
SHAPES |= {"key": (WIDTH, KEY_HEADS, SIZE), "value": (WIDTH, KEY_HEADS, SIZE)}
SHAPES |= {"query_scale": (SIZE,), "key_scale": (SIZE,)}


def rotated(x: jax.Array, scale: jax.Array, positions: jax.Array) -> jax.Array:
    x = unit(x) * (1 + scale)
    return jnp.concatenate([rope(x[..., :ROTATED], positions, 10_000_000.0), x[..., ROTATED:]], -1)


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, gate, key, value = project(weights, x, "query", "gate", "key", "value")
    query, key = rotated(query, weights["query_scale"], positions), rotated(key, weights["key_scale"], positions)
    out = ring_attention(query, key, value, causal=True, **ring) * jax.nn.sigmoid(gate)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="contiguous", strategy="ulysses")
