# SPDX-License-Identifier: Apache-2.0
"""What one query and one key score, tile by tile, in the order that the specification gives.

Inside this package scores are `[b k t g s]`: batch, key head, query, query head of that key head, key.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core.protocol import Block

Scores = Float32[Array, "b k t g s"]


def capped(tile: Block) -> Scores:
    """The scaled products, capped where the rule says so: all that depends on queries and keys."""
    rule = tile.rule
    s = product("btkgh,bskh->bktgs", grouped(tile.q, tile), tile.k, tile) * rule.scale
    return s if rule.soft_cap is None else rule.soft_cap * jnp.tanh(s / rule.soft_cap)


def biased(s: Scores, tile: Block) -> Scores:
    """The scores with all that is added to them."""
    if tile.bias is not None:
        s = s + by_group(tile.bias.astype(jnp.float32), tile)
    if tile.slopes is not None:
        s = s - by_group(tile.slopes[:, :, None, None] * distance(tile)[:, None], tile)
    return s


def distance(tile: Block) -> Float32[Array, "b t s"]:
    return jnp.abs(tile.q_positions[:, :, None] - tile.kv_positions[:, None, :]).astype(jnp.float32)


def product(equation: str, a: Float[Array, "..."], b: Float[Array, "..."], tile: Block) -> Float32[Array, "..."]:
    """A product of tiles, accumulated in float32; of float32 exact, unless the rule asks for less."""
    precision: Any = tile.rule.precision
    if precision is None and a.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def grouped(x: Float[Array, "b t n h"], tile: Block) -> Float[Array, "b t k g h"]:
    return x.reshape(*x.shape[:2], -1, tile.group, x.shape[-1])


def by_group(x: Any, tile: Block) -> Any:
    """What is `[b n t s]`, some of them 1, laid out to meet scores."""
    batch, heads, *rest = x.shape
    if heads == 1:
        return x[:, :, :, None, :]
    return jnp.swapaxes(x.reshape(batch, -1, tile.group, *rest), 2, 3)


def of_rows(x: Float32[Array, "B N T"], block: Block) -> Float32[Array, "B K T G"]:
    """What each query has one of, laid out to meet scores."""
    return jnp.swapaxes(x.reshape(x.shape[0], -1, block.group, x.shape[-1]), 2, 3)


def to_rows(x: Float32[Array, "B K T G"]) -> Float32[Array, "B N T"]:
    """The inverse of `of_rows`."""
    return jnp.swapaxes(x, 2, 3).reshape(x.shape[0], -1, x.shape[2])
