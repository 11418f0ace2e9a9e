# SPDX-License-Identifier: Apache-2.0
"""Choosing keys and teaching an indexer, in NumPy and float64: what `ringattn_sparse` must return."""

from typing import Any

import numpy as np


def index_scores(query: Any, key: Any, weights: Any, groups: int, activation: Any) -> np.ndarray:
    """The index scores `[B, G, T, S]`; the keys are `[B, S, D]` or `[B, S, G, D]`."""
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    batch, tokens, heads, _ = query.shape
    key = key[:, :, None] if key.ndim == 3 else key
    key = np.repeat(key, heads // key.shape[2], 2)
    found = activation(np.einsum("bthd,bshd->bhts", query, key))
    if weights is not None:
        found = found * np.moveaxis(np.asarray(weights, np.float64), 2, 1)[..., None]
    return found.reshape(batch, groups, -1, tokens, key.shape[1]).sum(2)


def seen_pairs(queries: int, keys: int, causal: bool, q_ids: Any = None, kv_ids: Any = None) -> np.ndarray:
    """Which keys each query sees, `[b, T, S]`."""
    seen = np.ones((1, queries, keys), bool)
    if causal:
        seen = seen & (np.arange(keys) <= np.arange(queries)[:, None])
    if q_ids is not None:
        seen = (
            seen & (np.asarray(q_ids)[:, :, None] == np.asarray(kv_ids)[:, None]) & (np.asarray(kv_ids)[:, None] >= 0)
        )
    return seen


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def chosen(
    query: Any,
    key: Any,
    weights: Any = None,
    *,
    count: int,
    size: int = 1,
    groups: int = 1,
    pool: str = "max",
    causal: bool = False,
    forced: tuple[int, int] = (0, 0),
    activation: Any = relu,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
) -> np.ndarray:
    """The ids that `select` must return, `[B, T, G, count]`."""
    ids = [q_segment_ids if q_segment_ids is not None else kv_segment_ids]
    ids.append(kv_segment_ids if kv_segment_ids is not None else q_segment_ids)
    key = np.asarray(key, np.float64)
    batch, tokens, length = query.shape[0], query.shape[1], key.shape[1]
    blocks = -(-length // size)
    seen = np.broadcast_to(seen_pairs(tokens, length, causal, *ids), (batch, tokens, length))
    found = np.full((batch, groups, tokens, blocks), -np.inf)
    scores = index_scores(query, key, weights, groups, activation)
    for block in range(blocks):
        at = slice(block * size, min((block + 1) * size, length))
        visible = seen[:, None, :, at]
        if pool == "mean":
            real = np.ones((batch, length)) if ids[1] is None else np.asarray(ids[1]) >= 0
            real = real[:, at].reshape(batch, -1, *[1] * (key.ndim - 2))
            mean = (key[:, at] * real).sum(1, keepdims=True) / np.maximum(real.sum(1, keepdims=True), 1)
            score = index_scores(query, mean, weights, groups, activation)[..., 0]
        else:
            score = np.where(visible, scores[..., at], -np.inf).max(-1)
        own = np.arange(tokens) // size
        must = (block < forced[0]) | ((own - block >= 0) & (own - block < forced[1]))
        found[..., block] = np.where(visible.any(-1), np.where(must, np.inf, score), -np.inf)
    order = np.argsort(-found, -1, kind="stable")[..., :count]
    there = np.take_along_axis(found, order, -1) > -np.inf
    best = np.sort(np.where(there, order, blocks), -1)
    return np.moveaxis(np.where(best == blocks, -1, best), 1, 2).astype(np.int32)
