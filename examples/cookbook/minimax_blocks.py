# SPDX-License-Identifier: Apache-2.0
"""Attention in the manner of MiniMax-M3: for each key head, an index head chooses the blocks that its queries see."""

import dense
import jax
import jax.numpy as jnp
from llama import HEADS, KEY_HEADS, SHAPES, project, rope
from one_device import WIDTH, compare
from ringattn_core import ring_attention
from ringattn_sparse import select

COUNT, BLOCK, INDEX = 4, 8, 16  # MiniMax-M3: 16, 128, 128
SHAPES = SHAPES | {"index_query": (WIDTH, KEY_HEADS, INDEX), "index_key": (WIDTH, 1, INDEX)}
NAMES = "query", "key", "value", "index_query", "index_key"


def projected(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array) -> list[jax.Array]:
    arrays = dict(zip(NAMES, project(weights, x, *NAMES), strict=True))
    return [arrays[name] if name == "value" else rope(arrays[name], positions) for name in NAMES]


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, key, value, index_query, index_key = projected(weights, x, positions)
    choice = {"count": COUNT, "size": BLOCK, "groups": KEY_HEADS, "forced": (0, 1), "activation": None}
    ids = select(index_query, index_key[:, :, 0], causal=True, **choice, **ring)
    out = ring_attention(query, key, value, selected=ids, selected_size=BLOCK, causal=True, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


def dense_layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array) -> jax.Array:
    query, key, value, index_query, index_key = projected(weights, x, positions)
    scores = dense.highest(jnp.einsum("btgd,bsd->bgts", index_query, index_key[:, :, 0]), BLOCK)
    out, _ = dense.attend(query, key, value, dense.chosen(scores, COUNT, HEADS, forced=(0, 1)))
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="zigzag", dense=dense_layer)
