# SPDX-License-Identifier: Apache-2.0
"""Heavily compressed attention in the manner of DeepSeek-V4: a window and compressed keys in one softmax."""

import dense
import jax
import jax.numpy as jnp
from llama import project, rope, unit
from one_device import LENGTH, WIDTH, compare
from ringattn_core import Partial, merge, ring_attention

HEADS, SIZE, RATIO, WINDOW = 8, 16, 8, 24  # DeepSeek-V4: one key head of 512, a ratio of 128, a window of 128
SHAPES = {"query": (WIDTH, HEADS, SIZE), "both": (WIDTH, 1, SIZE), "compressed": (WIDTH, 1, SIZE)}
SHAPES |= {"share": (WIDTH, 1, SIZE), "out": (HEADS, SIZE, WIDTH), "sink": (HEADS,)}


def projected(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array) -> list[jax.Array]:
    """Queries; one head that is key and value of each token; one that is key and value of each `RATIO` tokens."""
    query, both, compressed, share = project(weights, x, "query", "both", "compressed", "share")
    blocks = compressed.shape[0], -1, RATIO, 1, SIZE
    share = jax.nn.softmax(share.reshape(blocks), 2)
    compressed = (compressed.reshape(blocks) * share).sum(2)
    starts = positions[:, ::RATIO]
    return [rope(query, positions), rope(both, positions), rope(unit(compressed), starts)]


def key_and_value(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
    """One array travels, and is both."""
    return x, x


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, both, compressed = projected(weights, x, positions)
    options = {"expand": key_and_value, "causal": True, "return_lse": True}
    # The sink counts once, so that only one of the calls gets it.
    near = ring_attention(query, both, sliding_window=(WINDOW - 1, 0), softmax_aux=weights["sink"], **options, **ring)
    # A query sees compressed keys of the blocks before its own.
    places = {"q_positions": positions[0], "kv_positions": positions[0, ::RATIO] + RATIO}
    far = ring_attention(query, compressed, **places, **options, **ring)
    out = merge(Partial(*near), Partial(*far)).out
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


def dense_layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array) -> jax.Array:
    query, both, compressed = projected(weights, x, positions)
    index = jnp.arange(LENGTH)
    near = dense.CAUSAL & (index[:, None] - index < WINDOW)
    far = index[::RATIO] + RATIO <= index[:, None]
    # The sink is the score of one more key, whose value is 0.
    keys = jnp.concatenate([both, compressed], 1)
    scores = jnp.einsum("btnh,bskh->bnts", query, keys) / SIZE**0.5
    scores = jnp.where(jnp.concatenate([near, far], 1), scores, -1e9)
    sink = jnp.broadcast_to(weights["sink"][:, None, None], (*scores.shape[:3], 1))
    pairs = jax.nn.softmax(jnp.concatenate([scores, sink], -1), -1)[..., :-1]
    out = jnp.einsum("bnts,bskh->btnh", pairs, keys)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="zigzag", dense=dense_layer)
