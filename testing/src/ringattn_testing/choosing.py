# SPDX-License-Identifier: Apache-2.0
"""Choosing keys and teaching an indexer, in NumPy and float64: what `ringattn_sparse` must return."""

from typing import Any

import jax
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


def attention_weights(
    query: Any,
    key: Any,
    lse: Any,
    groups: int,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
) -> np.ndarray:
    """`Σ exp(s - lse)` over the query heads of each group, `[B, G, T, S]`, of all pairs."""
    query, key, lse = (np.asarray(x, np.float64) for x in (query, key, lse))
    key = np.repeat(key, query.shape[2] // key.shape[2], 2)
    scores = np.einsum("btnh,bsnh->bnts", query, key) * (softmax_scale or query.shape[-1] ** -0.5)
    scores = scores if logits_soft_cap is None else logits_soft_cap * np.tanh(scores / logits_soft_cap)
    with np.errstate(over="ignore"):  # of pairs that are not seen
        weights = np.exp(scores - np.where(np.isneginf(lse), np.inf, lse)[..., None])
    return weights.reshape(weights.shape[0], groups, -1, *weights.shape[2:]).sum(2)


def log_sum_exp(query: Any, key: Any, seen: np.ndarray, **options: Any) -> np.ndarray:
    """The `lse` `[B, N, T]` of attention in which each query sees the keys in `seen`, `[b, n, T, S]`."""
    zeros = np.zeros((query.shape[0], query.shape[2], query.shape[1]))
    total = (attention_weights(query, key, zeros, query.shape[2], **options) * seen).sum(-1)
    with np.errstate(divide="ignore"):
        return np.log(total)


def taught(
    index_query: Any,
    index_key: Any,
    weights: Any,
    query: Any,
    key: Any,
    lse: Any,
    *,
    groups: int = 1,
    selected: Any = None,
    selected_size: int = 1,
    causal: bool = False,
    activation: Any = relu,
    derivative: Any = lambda x: x > 0,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    **options: Any,
) -> tuple[float, list[np.ndarray]]:
    """The loss that `teach` must return, and its gradients by the index queries, the index keys and the weights."""
    index_query, index_key = (np.asarray(x, np.float64) for x in (index_query, index_key))
    keys, heads = index_key.shape[1], index_query.shape[2]
    ids = [q_segment_ids if q_segment_ids is not None else kv_segment_ids]
    ids.append(kv_segment_ids if kv_segment_ids is not None else q_segment_ids)
    seen = seen_pairs(query.shape[1], keys, causal, *ids)[:, None]
    if selected is not None:
        chosen_ids = np.moveaxis(np.asarray(selected), 2, 1)
        seen = seen & (chosen_ids[..., None] == np.arange(keys) // selected_size).any(-2)
    weight = np.where(seen, attention_weights(query, key, lse, groups, **options), 0)
    total = weight.sum(-1, keepdims=True)
    some = total > 0
    p = weight / np.where(some, total, 1)
    scores = np.where(seen & some, index_scores(index_query, index_key, weights, groups, activation), -np.inf)
    top = np.where(some, scores.max(-1, keepdims=True), 0)
    lse_of_scores = top + np.log(np.where(some, np.exp(scores - top).sum(-1, keepdims=True), 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        loss = np.where(p > 0, p * (np.log(p) - (scores - lse_of_scores)), 0).sum() / some.sum()
    dscores = np.where(some, np.exp(scores - lse_of_scores) - p, 0) / some.sum()

    def of_heads(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, heads // groups, 1)

    repeated = index_key[:, :, None] if index_key.ndim == 3 else index_key
    shared = repeated.shape[2]
    repeated = np.repeat(repeated, heads // shared, 2)
    x = np.einsum("bthd,bshd->bhts", index_query, repeated)
    dweights = np.moveaxis((of_heads(dscores) * activation(x)).sum(-1), 1, 2)
    factor = 1 if weights is None else np.moveaxis(np.asarray(weights, np.float64), 2, 1)[..., None]
    dx = of_heads(dscores) * factor * derivative(x)
    dquery = np.einsum("bhts,bshd->bthd", dx, repeated)
    dkey = np.einsum("bhts,bthd->bshd", dx, index_query)
    dkey = dkey.reshape(*dkey.shape[:2], shared, -1, dkey.shape[3]).sum(3).reshape(index_key.shape)
    return float(loss), [dquery, dkey, dweights]


def sizes_in(jaxpr: Any) -> list[int]:
    """The sizes of all arrays that a traced program computes, those of the programs inside it too."""
    found = [x.aval.size for equation in jaxpr.eqns for x in equation.outvars if hasattr(x.aval, "size")]
    for equation in jaxpr.eqns:
        inside = jax.tree.leaves([*equation.params.values()], is_leaf=lambda x: hasattr(x, "jaxpr"))
        for program in (getattr(x, "jaxpr", x) for x in inside):
            found += sizes_in(program) if hasattr(program, "eqns") else []
    return found
