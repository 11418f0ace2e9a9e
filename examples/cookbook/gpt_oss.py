# SPDX-License-Identifier: Apache-2.0
"""Attention of gpt-oss: a learned sink for each head, and a window in every other layer."""

import jax
import jax.numpy as jnp
from llama import HEADS, SHAPES, project, rope
from one_device import compare
from ringattn_core import ring_attention

WINDOW = 16  # gpt-oss: 128
SHAPES = SHAPES | {"sinks": (HEADS,)}


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, local: bool, **ring) -> jax.Array:
    query, key, value = project(weights, x, "query", "key", "value")
    query, key = rope(query, positions, 150_000.0), rope(key, positions, 150_000.0)
    window = (WINDOW - 1, 0) if local else None  # the query's own key counts
    out = ring_attention(query, key, value, weights["sinks"], causal=True, sliding_window=window, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


def layers(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    return layer(weights, layer(weights, x, positions, local=True, **ring), positions, local=False, **ring)


if __name__ == "__main__":
    # `tp` splits the heads and their sinks; two of the four key heads are left for each ring of two ranks.
    compare(layers, SHAPES, {"dp": 2, "tp": 2, "sp": 2}, layout="contiguous", strategy="auto")
