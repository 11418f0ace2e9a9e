# SPDX-License-Identifier: Apache-2.0
"""Global attention of Gemma 4: keys and values are made of one projection, which travels in place of both."""

import jax
import jax.numpy as jnp
from llama import project, rope, unit
from one_device import WIDTH, compare
from ringattn_core import ring_attention

HEADS, KEY_HEADS, SIZE = 8, 2, 32  # Gemma 4 31B: 32, 4, 512
SHAPES = {"query": (WIDTH, HEADS, SIZE), "key": (WIDTH, KEY_HEADS, SIZE), "out": (HEADS, SIZE, WIDTH)}
SHAPES |= {"query_scale": (SIZE,), "key_scale": (SIZE,)}


def rotated(x: jax.Array, scale: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates the first quarter of the pairs of each head; the others, of lower frequencies, stay (p-RoPE)."""
    return rope(unit(x) * (1 + scale), positions, 1_000_000.0, turning=0.25)


def key_and_value(x: dict[str, jax.Array], key_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rotated(x["projected"], key_scale, x["positions"]), unit(x["projected"])


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, projected = project(weights, x, "query", "key")
    query = rotated(query, weights["query_scale"], positions)
    # Keys are rotated on arrival, so each token's position travels with it.
    both = {"projected": projected, "positions": jnp.broadcast_to(positions, x.shape[:2])}
    options = {"expand": key_and_value, "expand_params": weights["key_scale"], "softmax_scale": 1.0}
    out = ring_attention(query, both, causal=True, **options, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    # Layers with a window, as in gemma.py, want contiguous order, in which `balance` gives ranks equal causal work.
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="contiguous", balance="zigzag")
