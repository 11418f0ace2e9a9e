# SPDX-License-Identifier: Apache-2.0
"""The scores of a tile of queries against a tile of keys, and the axis orders in which they are computed.

Inside this package a tile of queries is `[b k r h]`. The rows `r` of key head `k` are the queries times the query heads
that read it, so that every product is one of plain matrices. Scores are `[b k r s]`, or `[b k s r]` if `by_keys`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.visibility import visible, with_forbidden

from .tiling import Arrays

Scores = Float32[Array, "b k r s"] | Float32[Array, "b k s r"]


def scores(q: Float[Array, "b k r h"], k: Float[Array, "b k s h"], tile: Block, by_keys: bool) -> tuple[Scores, Scores]:
    """The scores, -inf where a key is masked out, and the scaled and capped products, without bias and slopes.

    Both are `[b k r s]`, or `[b k s r]` if `by_keys`.
    """
    rule = tile.rule
    s = (product(k, q, 3, tile) if by_keys else product(q, k, 3, tile)) * rule.softmax_scale
    if rule.logits_soft_cap is not None:
        s = rule.logits_soft_cap * jnp.tanh(s / rule.logits_soft_cap)
    capped = s
    s = _with_terms(s, {"bias": tile.bias, "slopes": tile.slopes}, tile, by_keys)
    seen = visible(tile)
    return s if seen is None else jnp.where(like_scores(seen, s, tile, by_keys), s, -jnp.inf), capped


def terms(block: Block) -> Arrays:
    """The bias, unless it is fixed, and the ALiBi slopes, in float32: what has a gradient besides q, k and v."""
    found = {"bias": None if block.bias_fixed else block.bias, "slopes": block.slopes}
    return {name: x.astype(jnp.float32) for name, x in found.items() if x is not None}


def term_gradients(ds: Scores, tile: Block) -> Arrays:
    """The gradients of the arrays in `terms(tile)`, by name, from `ds`, `[b k s r]`."""
    return jax.vjp(lambda terms: _with_terms(ds, terms, tile, by_keys=True), terms(tile))[1](ds)[0]


def _with_terms(s: Scores, terms: Mapping[str, Any], tile: Block, by_keys: bool) -> Scores:
    if terms.get("bias") is not None:
        s = s + like_scores(with_forbidden(terms["bias"]), s, tile, by_keys)
    if terms.get("slopes") is not None:
        distance = jnp.abs(tile.q_positions[:, None, :, None] - tile.kv_positions[:, None, None, :])
        s = s - like_scores(terms["slopes"][:, :, None, None] * distance.astype(jnp.float32), s, tile, by_keys)
    return s


def product(a: Float[Array, "b k i h"], c: Float[Array, "b k x y"], contracted: int, tile: Block) -> Scores:
    """The product of `a` and `c`, summed over the last axis of `a` and axis `contracted` of `c`, in float32.

    Float32 inputs are multiplied at the highest precision, unless the rule asks for less.
    """
    precision: Any = tile.rule.precision
    if precision is None and c.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    dimensions = (((3,), (contracted,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, c, dimensions, precision=precision, preferred_element_type=jnp.float32)


def rows(x: Float[Array, "b t n h"], tile: Block) -> Float[Array, "b k r h"]:
    """The queries of the heads that read a key head as rows of this key head; `unrows` is the inverse."""
    batch, length, heads, size = x.shape
    split = x.reshape(batch, length, heads // tile.group, tile.group, size)
    return split.transpose(0, 2, 1, 3, 4).reshape(batch, heads // tile.group, -1, size)


def unrows(x: Float[Array, "b k r h"], tile: Block) -> Float[Array, "b t n h"]:
    """Moves the rows of each key head back to the query heads that read it; the inverse of `rows`."""
    batch, heads, _, size = x.shape
    split = x.reshape(batch, heads, -1, tile.group, size)
    return split.transpose(0, 2, 1, 3, 4).reshape(batch, -1, heads * tile.group, size)


def row_values(x: Float32[Array, "B N T"], block: Block) -> Float32[Array, "B K R"]:
    """Puts `x`, one number for each query of each head, in the order of `rows`."""
    return rows(jnp.swapaxes(x, 1, 2)[..., None], block)[..., 0]


def from_row_values(x: Float32[Array, "B K R"], block: Block) -> Float32[Array, "B N T"]:
    """One number for each query of each head, from the order of `rows`; the inverse of `row_values`."""
    return jnp.swapaxes(unrows(x[..., None], block)[..., 0], 1, 2)


def like_scores(x: Any, s: Scores, tile: Block, by_keys: bool) -> Any:
    """Broadcasts `x [b n t s]`, whose axes may be 1, to the shape of the scores `s`: `[b k s r]` if `by_keys`."""
    batch, key_heads = s.shape[:2]
    heads, length, keys = tile.q.shape[2], tile.q_length, tile.kv_length
    group = tile.group if x.shape[1] == heads else 1
    x = x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:])
    x = x.transpose(0, 1, 4, 3, 2) if by_keys else x.transpose(0, 1, 3, 2, 4)
    full = (keys, length, tile.group) if by_keys else (length, tile.group, keys)
    return jnp.broadcast_to(x, (batch, key_heads, *full)).reshape(s.shape)
