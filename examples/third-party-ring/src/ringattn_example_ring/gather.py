# SPDX-License-Identifier: Apache-2.0
"""A ring function that all-gathers the keys, so that each rank attends to the keys of all ranks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core import to_layout
from ringattn_core.masks import Causal, Chunked, Coordinates, Local

product = functools.partial(jnp.einsum, precision="highest")


def ring_attention(*, query, key, value, **options: Any):
    """Gathers keys as float32, so that JAX sums the gradients of all ranks in float32 too."""
    axis, group = options["axis_name"] or (), query.shape[2] // key.shape[2]

    def all_ranks(x: Any) -> Any:
        return jax.lax.all_gather(x, axis, axis=1, tiled=True) if axis and x is not None else x

    ranks, rank = (jax.lax.psum(1, axis), jax.lax.axis_index(axis)) if axis else (1, 0)
    q_index, kv_index = (to_layout(np.arange(ranks * x.shape[1]), options["layout"], ranks, 0) for x in (query, key))
    q_index = jax.lax.dynamic_slice_in_dim(q_index, rank * query.shape[1], query.shape[1])
    k, v = (jnp.repeat(all_ranks(x.astype(jnp.float32)), group, axis=2) for x in (key, value))
    s = product("btnh,bsnh->bnts", query.astype(jnp.float32), k) * options["softmax_scale"]
    s = jnp.where(visible(options, q_index[None], kv_index[None], all_ranks(options["kv_segment_ids"])), s, -jnp.inf)
    if (sinks := options["softmax_aux"]) is not None:  # a sink is a key without a value
        columns = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], (*s.shape[:3], sinks.shape[1]))
        s = jnp.concatenate([s, columns], -1)
    empty = jnp.isneginf(s).all(-1)
    s = jnp.where(empty[..., None], 0.0, s)
    lse = jax.nn.logsumexp(s, -1)
    p = jnp.where(empty[..., None], 0.0, jnp.exp(s - lse[..., None]))[..., : k.shape[1]]
    out = product("bnts,bsnh->btnh", p, v).astype(query.dtype)
    return (out, jnp.where(empty, -jnp.inf, lse)) if options["return_lse"] else out


def visible(options, q_index, kv_index, kv_segments):
    """Which keys of all ranks each query of this rank sees, `[B, 1, T, S]`."""
    window, chunk = options["sliding_window"], options["chunk_size"]
    masks = [Causal()] * options["causal"] + ([Local(*window)] if window else []) + ([Chunked(chunk)] if chunk else [])
    q, kv = Coordinates(q_index, q_index).rows(), Coordinates(kv_index, kv_index).columns()
    seen = functools.reduce(jnp.logical_and, (mask.visible(q, kv)[:, None] for mask in masks), jnp.asarray(True))
    if (ids := options["q_segment_ids"]) is not None:
        seen = seen & (ids[:, None, :, None] == kv_segments[:, None, None, :]) & (ids >= 0)[:, None, :, None]
    return seen
