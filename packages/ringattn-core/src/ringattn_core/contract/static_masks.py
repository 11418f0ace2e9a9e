# SPDX-License-Identifier: Apache-2.0
"""Into which calls with a static mask, causal or none, a block is cut, and how their results return to the block."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from .protocol import Block


@dataclasses.dataclass(frozen=True)
class Part:
    """Some tokens of a block, in the order in which a call reads them.

    `take(x, axis)` gives them of an array of the block. `put(x, axis, fill)` gives a result of the call the length of
    the block again: `fill` is the value of the tokens that are not in the call.
    """

    take: Callable[[jax.Array, int], jax.Array]
    put: Callable[[jax.Array, int, float], jax.Array]


@dataclasses.dataclass(frozen=True)
class Piece:
    """One call: which queries and keys it has, and whether query `i` sees only the keys up to `i` or all."""

    causal: bool
    queries: Part
    keys: Part
    unseeing: Bool[Array, "b t"] | None = None
    """The queries of the call that see none of its keys in the block. Their results are dropped."""


def pieces(block: Block) -> list[Piece]:
    """The calls of a block whose mask is causal or none. Each query and key that see each other are in one of them.

    The positions of a shard grow in every layout: a rank's own keys are one causal call. For other keys the mask
    depends on which rank is the earlier one. That is known at run time only, so it selects rows and never a branch: XLA
    would wait for all sends before a `lax.cond`.
    """
    if not block.rule.causal:
        return [Piece(False, _WHOLE, _WHOLE)]
    earlier = block.kv_index[:, 0] < block.q_index[:, 0]
    if block.keys_from == "own":
        return [Piece(True, _WHOLE, _WHOLE)]
    if block.keys_from == "contiguous":
        return [Piece(False, _WHOLE, _WHOLE, ~earlier[:, None])]
    if block.keys_from == "zigzag":
        # The second chunk of queries sees the first chunk of keys. Beside that, the first sees the first where the keys
        # are of an earlier rank, or the second the second.
        first, chosen = jnp.array([True]), _chunk(earlier)
        return [Piece(False, _chunk(~first), _chunk(first)), Piece(False, chosen, chosen)]
    # Striped: query `i` sees the keys of an earlier rank up to `i`, of a later rank up to `i - 1`. With its first row
    # moved to the end the latter is causal too.
    last = jnp.arange(block.q_length) == block.q_length - 1
    return [Piece(True, _rotated(~earlier), _WHOLE, ~earlier[:, None] & last)]


_WHOLE = Part(lambda x, axis: x, lambda x, axis, fill: x)


def _chunk(first: Bool[Array, " b"]) -> Part:
    """The first of two chunks where `first`, else the second."""

    def take(x: jax.Array, axis: int) -> jax.Array:
        return _where(first, *jnp.split(x, 2, axis))

    def put(x: jax.Array, axis: int, fill: float) -> jax.Array:
        rest = jnp.full_like(x, fill)
        return jnp.concatenate([_where(first, x, rest), _where(first, rest, x)], axis)

    return Part(take, put)


def _rotated(where: Bool[Array, " b"]) -> Part:
    """All tokens, with the first moved to the end in the batch rows of `where`."""
    return Part(
        lambda x, axis: _where(where, jnp.roll(x, -1, axis), x),
        lambda x, axis, fill: _where(where, jnp.roll(x, 1, axis), x),
    )


def _where(rows: Bool[Array, " b"], x: Any, y: Any) -> jax.Array:
    """`x` in the batch rows of `rows`, else `y`. The batch is the first axis."""
    return jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
