# SPDX-License-Identifier: Apache-2.0
"""MoBA, as in Kimi: each head sees its own block, and those whose mean key fits its query best. It has no indexer."""

import dense
import jax
import jax.numpy as jnp
from llama import SIZE, project, rope
from one_device import WIDTH, compare
from ringattn_core import ring_attention
from ringattn_sparse import select

HEADS, COUNT, BLOCK = 4, 3, 16  # the paper's 1M model: 32, 12, 4,096
SHAPES = {name: (WIDTH, HEADS, SIZE) for name in ("query", "key", "value")} | {"out": (HEADS, SIZE, WIDTH)}


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, key, value = project(weights, x, "query", "key", "value")
    query, key = rope(query, positions), rope(key, positions)
    # The mean of a query's own block has later keys too, so the block is chosen whatever its score.
    choice = {"pool": "mean", "forced": (0, 1), "activation": None}
    ids = select(query, key, count=COUNT, size=BLOCK, groups=HEADS, causal=True, **choice, **ring)
    out = ring_attention(query, key, value, selected=ids, selected_size=BLOCK, causal=True, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


def dense_layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array) -> jax.Array:
    query, key, value = project(weights, x, "query", "key", "value")
    query, key = rope(query, positions), rope(key, positions)
    means = key.reshape(key.shape[0], -1, BLOCK, HEADS, SIZE).mean(2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, means)
    out, _ = dense.attend(query, key, value, dense.chosen(scores, COUNT, HEADS, forced=(0, 1)))
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="zigzag", dense=dense_layer)
