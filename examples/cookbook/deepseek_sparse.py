# SPDX-License-Identifier: Apache-2.0
"""Attention in the manner of DeepSeek-V3.2: an indexer chooses keys for all heads, and learns from its own loss."""

import deepseek
import dense
import jax
import jax.numpy as jnp
from deepseek import LATENT, SIZE
from llama import project, rope, unit
from one_device import LENGTH, WIDTH, compare
from ringattn_core import ring_attention
from ringattn_sparse import select, teach

COUNT, INDEX_HEADS, INDEX = 32, 4, 16  # DeepSeek-V3.2: 2,048, 64, 128
SHAPES = deepseek.SHAPES | {"index_query": (WIDTH, INDEX_HEADS, INDEX), "index_key": (WIDTH, 1, INDEX)}
SHAPES |= {"index_weight": (WIDTH, INDEX_HEADS)}


def attended(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries of all heads, and one array that travels: the latent and the rotated key."""
    (query,) = project(weights, x, "query")
    query = jnp.concatenate([query[..., :SIZE], rope(query[..., SIZE:], positions, 10_000.0)], -1)
    down = unit(x) @ weights["down"]
    rotated = rope(down[:, :, None, LATENT:], positions, 10_000.0)[:, :, 0]
    return query, jnp.concatenate([down[..., :LATENT], rotated], -1)


def indexer(
    weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys of the indexer, and the weights of its heads. Its loss trains nothing before it."""
    x = jax.lax.stop_gradient(x)
    query, key = (rope(array, positions, 10_000.0) for array in project(weights, x, "index_query", "index_key"))
    scale = (INDEX * INDEX_HEADS) ** -0.5
    return query, key[:, :, 0], unit(x) @ weights["index_weight"] * scale


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> tuple[jax.Array, jax.Array]:
    """The output, and the loss of the indexer."""
    query, latent = attended(weights, x, positions)
    index = indexer(weights, x, positions)
    ids = select(*index, count=COUNT, causal=True, **ring)
    chosen = {"selected": ids, "causal": True, "softmax_scale": query.shape[-1] ** -0.5}
    params = {name: weights[name] for name in ("key", "value")}
    out, lse = ring_attention(
        query, latent, expand=deepseek.key_and_value, expand_params=params, return_lse=True, **chosen, **ring
    )
    # The same scores with one key head, the normalised latent: queries take the up-projection of the keys.
    absorbed = jnp.einsum("btnh,lnh->btnl", query[..., :SIZE], weights["key"])
    absorbed = jnp.concatenate([absorbed, query[..., SIZE:]], -1)
    key = jnp.concatenate([unit(latent[..., :LATENT]), latent[..., LATENT:]], -1)
    loss = teach(*index, absorbed, key[:, :, None], lse, **chosen, **ring)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"]), loss


def dense_layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    query, latent = attended(weights, x, positions)
    index_query, index_key, index_weight = indexer(weights, x, positions)
    scores = jax.nn.relu(jnp.einsum("bthd,bsd->bhts", index_query, index_key))
    scores = jnp.einsum("bhts,bth->bts", scores, index_weight)
    seen = dense.chosen(scores[:, None], COUNT, query.shape[2])
    out, pairs = dense.attend(query, *deepseek.key_and_value(latent, weights), seen)
    # The loss: KL(p || softmax(scores)) over the chosen keys, where p is the mean over the heads.
    p, scores = jax.lax.stop_gradient(pairs.mean(1)), jnp.where(seen[:, 0], scores, -1e9)
    divergence = p * (jnp.log(jnp.where(p > 0, p, 1)) - jax.nn.log_softmax(scores, -1))
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"]), divergence.sum() / (x.shape[0] * LENGTH)


if __name__ == "__main__":
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="zigzag", dense=dense_layer)
