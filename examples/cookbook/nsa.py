# SPDX-License-Identifier: Apache-2.0
"""Attention in the manner of NSA: compressed keys, chosen blocks and a window, a softmax and a gate for each."""

import dense
import jax
import jax.numpy as jnp
from llama import HEADS, KEY_HEADS, SHAPES, SIZE, project, rope
from one_device import LENGTH, WIDTH, compare
from ringattn_core import ring_attention
from ringattn_sparse import select

COUNT, BLOCK, WINDOW = 5, 8, 24  # the paper: 16, 64, 512
SHAPES = SHAPES | {"gates": (WIDTH, HEADS, 3)}


def projected(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array) -> list[jax.Array]:
    query, key, value, gates = project(weights, x, "query", "key", "value", "gates")
    return [rope(query, positions), rope(key, positions), value, jax.nn.sigmoid(gates)]


def compressed(x: jax.Array) -> jax.Array:
    """The mean of each block of tokens. A block lies on one rank, so this sends nothing."""
    return x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:]).mean(2)


def gated(weights: dict[str, jax.Array], gates: jax.Array, *branches: jax.Array) -> jax.Array:
    return jnp.einsum("btnhi,btni,nhc->btc", jnp.stack(branches, -1), gates, weights["out"])


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, key, value, gates = projected(weights, x, positions)
    # A query sees the compressed key of a block from the last token of the block on.
    places = {"q_positions": positions[0], "kv_positions": positions[0].reshape(-1, BLOCK)[:, -1]}
    coarse, lse = ring_attention(
        query, compressed(key), compressed(value), causal=True, return_lse=True, **places, **ring
    )
    # The score of a block is the weight of its compressed key, exp(score - lse), summed over the query heads of a key
    # head. One more component of queries and keys subtracts the lse. Where it is -inf, only forced blocks are there.
    lse = jnp.swapaxes(jnp.where(jnp.isfinite(lse), lse, 0), 1, 2)[..., None]
    index_query = jnp.concatenate([query * SIZE**-0.5, -lse], -1)
    index_key = jnp.concatenate([key, jnp.ones_like(key[..., :1])], -1)
    choice = {"count": COUNT, "size": BLOCK, "groups": KEY_HEADS, "pool": "mean", "forced": (1, 2)}
    ids = select(index_query, index_key, causal=True, activation=jnp.exp, **choice, **ring)
    fine = ring_attention(query, key, value, selected=ids, selected_size=BLOCK, causal=True, **ring)
    near = ring_attention(query, key, value, sliding_window=(WINDOW - 1, 0), causal=True, **ring)
    return x + gated(weights, gates, coarse, fine, near)


def dense_layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array) -> jax.Array:
    query, key, value, gates = projected(weights, x, positions)
    index = jnp.arange(LENGTH)
    complete = index[BLOCK - 1 :: BLOCK] <= index[:, None]
    coarse, pairs = dense.attend(query, compressed(key), compressed(value), complete)
    scores = pairs.reshape(pairs.shape[0], KEY_HEADS, -1, *pairs.shape[2:]).sum(2)
    fine, _ = dense.attend(query, key, value, dense.chosen(scores, COUNT, HEADS, forced=(1, 2)))
    near, _ = dense.attend(query, key, value, dense.CAUSAL & (index[:, None] - index < WINDOW))
    return x + gated(weights, gates, coarse, fine, near)


if __name__ == "__main__":
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="zigzag", dense=dense_layer)
