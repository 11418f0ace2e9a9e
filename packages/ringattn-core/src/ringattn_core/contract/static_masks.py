# SPDX-License-Identifier: Apache-2.0
"""Cuts a block into calls whose mask is static, causal or none, and puts their results back in block order."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from .protocol import Block, BlockKernel


def wants_static_masks(kernel: BlockKernel) -> bool:
    """Whether the kernel sets `static_masks`: it then gets `Block.keys_from`, and in `backward` also `Block.out`."""
    return getattr(kernel, "static_masks", False)


def wants_key_indices(kernel: BlockKernel) -> bool:
    """Whether the kernel sets `key_indices`: `first` and `last` of its blocks are then indices of their keys."""
    return getattr(kernel, "key_indices", False)


@dataclasses.dataclass(frozen=True)
class Part:
    """Some tokens of a block, in the order in which a call reads them.

    `take(x, axis)` selects these tokens from an array of the block. `put(x, axis, fill)` is the inverse, for a
    result of the call: it returns an array of the block's length, with `fill` at the tokens that are not in the call.
    """

    take: Callable[[jax.Array, int], jax.Array]
    put: Callable[[jax.Array, int, float], jax.Array]


@dataclasses.dataclass(frozen=True)
class Piece:
    """One call of some `queries` and some `keys`. Query `i` sees the keys up to `i` if `causal`, else all of them.

    If the piece has `first` and `last` (`key_ranges.ranged`), query `i` sees the keys from `first[i]` to `last[i]`.
    """

    causal: bool
    queries: Part
    keys: Part
    sees_nothing: Bool[Array, "b n t"] | None = None
    """True for queries that must see none of the keys. The call computes their results, which are then dropped."""
    first: Int32[Array, "b n T"] | None = None
    last: Int32[Array, "b n T"] | None = None


def pieces(block: Block) -> list[Piece]:
    """Cuts `block`, whose mask is causal or none, into calls. Every visible pair of query and key is in exactly one.

    Positions grow within a shard in every layout, so a rank's own keys need one causal call. For the keys of another
    rank, the mask depends on which of the two ranks comes earlier, which is known only at run time. In both cases the
    same calls run, on different rows: XLA would wait for all sends before a `lax.cond`.
    """
    if not block.reach.causal:
        return [Piece(False, WHOLE, WHOLE)]
    earlier = block.kv_index[:, 0] < block.q_index[:, 0]
    if block.keys_from == "own":
        return [Piece(True, WHOLE, WHOLE)]
    if block.keys_from == "contiguous":
        return [Piece(False, WHOLE, WHOLE, ~earlier[:, None, None])]
    if block.keys_from == "zigzag":
        # The second chunk of queries always sees the first chunk of keys. If the keys are of an earlier rank, the first
        # chunk of queries also sees the first chunk of keys; else the second also sees the second.
        first, chosen = jnp.array([True]), _chunk(earlier)
        return [Piece(False, _chunk(~first), _chunk(first)), Piece(False, chosen, chosen)]
    # Striped: query `i` sees the keys of an earlier rank up to `i`, and the keys of a later rank up to `i - 1`. The
    # second case is causal too once the first query, which sees nothing, is moved to the end.
    last = jnp.arange(block.q_length) == block.q_length - 1
    return [Piece(True, _rotated(~earlier), WHOLE, ~earlier[:, None, None] & last[None, None])]


WHOLE = Part(lambda x, axis: x, lambda x, axis, fill: x)
"""All tokens of the block, as they are."""


def _chunk(first: Bool[Array, " b"]) -> Part:
    """The first half of the tokens in the batch rows where `first` is true, else the second half."""

    def take(x: jax.Array, axis: int) -> jax.Array:
        size = x.shape[axis] // 2
        start = jnp.where(first, 0, size)
        if len(start) == 1:
            return jax.lax.dynamic_slice_in_dim(x, start[0], size, axis)
        return jax.vmap(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, size, axis - 1))(x, start)

    def put(x: jax.Array, axis: int, fill: float) -> jax.Array:
        rest = jnp.full_like(x, fill)
        return jnp.concatenate([_where(first, x, rest), _where(first, rest, x)], axis)

    return Part(take, put)


def _rotated(where: Bool[Array, " b"]) -> Part:
    """All tokens; in the batch rows where `where` is true, the first token is moved to the end."""
    return Part(
        lambda x, axis: _where(where, jnp.roll(x, -1, axis), x),
        lambda x, axis, fill: _where(where, jnp.roll(x, 1, axis), x),
    )


def _where(rows: Bool[Array, " b"], x: Any, y: Any) -> jax.Array:
    """`x` in the batch rows where `rows` is true, else `y`. The batch is the first axis."""
    return jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
