# SPDX-License-Identifier: Apache-2.0
"""Attention of Gemma 2 and 3: layers with a window among layers that see everything, norms of heads, a soft cap."""

import jax
import jax.numpy as jnp
from llama import SHAPES, SIZE, project, rope, unit
from one_device import compare
from ringattn_core import ring_attention

WINDOW = 24  # Gemma 3: 1024, or 512 in 1B
SHAPES = SHAPES | {"query_scale": (SIZE,), "key_scale": (SIZE,)}


def projected(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, local: bool) -> list[jax.Array]:
    """Query, key and value; query and key are normalised and rotated."""
    query, key, value = project(weights, x, "query", "key", "value")
    base = 10_000.0 if local else 1_000_000.0
    query = rope(unit(query) * (1 + weights["query_scale"]), positions, base)
    key = rope(unit(key) * (1 + weights["key_scale"]), positions, base)
    return [query, key, value]


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, local: bool, **ring) -> jax.Array:
    # A window of Gemma counts the query's own key; ours is the distance to the farthest key.
    window = (WINDOW - 1, 0) if local else None
    # Gemma 3 has norms of heads and no cap, Gemma 2 has a cap of 50 and no norms; here are both.
    options = {"sliding_window": window, "logits_soft_cap": 50.0, "softmax_scale": SIZE**-0.5}
    out = ring_attention(*projected(weights, x, positions, local), causal=True, **options, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


def layers(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    return layer(weights, layer(weights, x, positions, local=True, **ring), positions, local=False, **ring)


if __name__ == "__main__":
    compare(layers, SHAPES, {"dp": 2, "sp": 4}, layout="contiguous", strategy="auto")
