# SPDX-License-Identifier: Apache-2.0
"""One call for a whole block: the first and the last key that each query sees, as indices of the keys of the call."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..masks import Reach
from ..masks.reach import moved
from ..placement.layout import Shards
from .protocol import Block
from .static_masks import WHOLE, Part, Piece
from .varying import align, axes_of


def in_indices(block: Block, shards: Shards, owner: Any, length: int, start: int) -> Block:
    """The block with `first`, `last` and `kv_positions` as indices of its keys, for a kernel with `key_indices`.

    The keys are those from `start` on in the shard of rank `owner`, which has `length` keys in the order of `shards`.
    They have the positions of the layout, which increase.
    """
    first, last = block.first, block.last
    return dataclasses.replace(
        block,
        first=first if first is None else shards.before(first, owner, length) - start,
        last=last if last is None else shards.before(moved(last, 1), owner, length) - 1 - start,
        kv_positions=jnp.arange(block.kv_length, dtype=jnp.int32)[None],
    )


def ranged(block: Block) -> Piece:
    """All queries and all keys of `block`, a block of a kernel with `key_indices`, in one call.

    Positions of keys increase within a shard in every layout, so the keys between two positions are consecutive there.
    With segment ids, the call gets keys in the order of their ids, and keys of one id in the order of the block: then
    the keys of one id between two positions are consecutive too, wherever tokens of other ids stand.

    `first` and `last` are within the keys. A query that sees none of the keys has the number of keys as `first`, and -1
    as `last`.
    """
    length, keys = block.kv_length, WHOLE
    unbounded = jnp.zeros((1, 1, block.q_length), jnp.int32)
    first = unbounded if block.first is None else block.first
    last = unbounded + (length - 1) if block.last is None else block.last
    if block.q_segments is not None and block.kv_segments is not None:
        ids, order = jax.lax.sort((block.kv_segments, _numbers(block.kv_segments)), num_keys=1)
        q_ids, keys = block.q_segments[:, None], _ordered(order)
        ends = jnp.concatenate(jnp.broadcast_arrays(first, last + 1), 2)  # one search for both
        first, last = jnp.split(_below(ids, order, jnp.tile(q_ids, (1, 1, 2)), ends), 2, 2)
        first, last = jnp.where(q_ids < 0, length, first), last - 1
    first, last = jnp.broadcast_arrays(first.clip(0, length), last.clip(-1, length - 1))
    nothing, causal = first > last, _is_causal(block)
    all_see = causal or (block.first is None and block.last is None and block.q_segments is None)
    first, last = jnp.where(nothing, length, first), jnp.where(nothing, -1, last)
    return Piece(causal, WHOLE, keys, None if all_see else nothing, first, last)


def _is_causal(block: Block) -> bool:
    """Whether query `i` sees exactly the keys up to `i` of the block.

    `reach` is the whole mask unless a query also has a range, which has a `first`. (Kernels with `key_indices` have no
    masks of a `mask_builder`.)
    """
    own = block.keys_from == "own" and block.q_length == block.kv_length
    return own and block.reach == Reach(causal=True) and block.first is None and block.q_segments is None


def _below(
    ids: Int32[Array, "B S"], order: Int32[Array, "B S"], q_ids: Int32[Array, "B 1 T"], index: Int32[Array, "b n T"]
) -> Int32[Array, "B n T"]:
    """How many of the pairs `(ids, order)`, which are sorted, are below each pair `(q_ids, index)`.

    A binary search: the count grows by powers of two, largest first, while the last pair that it counts is below.
    """
    length = ids.shape[1]
    bits = length.bit_length()
    q_ids, index = align(tuple(jnp.broadcast_arrays(q_ids, index)), axes_of(ids, order, q_ids, index))

    def grown(number: Any, count: jax.Array) -> jax.Array:
        larger = count + (1 << (bits - 1 - number))
        id_there, index_there = (_entries(x, larger - 1) for x in (ids, order))
        below = (id_there < q_ids) | ((id_there == q_ids) & (index_there < index))
        return jnp.where(below & (larger <= length), larger, count)

    return jax.lax.fori_loop(0, bits, grown, jnp.zeros_like(index))


def _ordered(order: Int32[Array, "B S"]) -> Part:
    """All tokens, in this order."""
    return Part(
        lambda x, axis: _rows(x, order, axis),
        lambda x, axis, fill: _rows(x, jnp.argsort(order, axis=1), axis),
    )


def _rows(x: jax.Array, at: Int32[Array, "B S"], axis: int) -> jax.Array:
    return jax.vmap(lambda x, at: jnp.take(x, at, axis - 1, mode="clip"))(x, at)


def _entries(x: Int32[Array, "B S"], at: Int32[Array, "B n T"]) -> Int32[Array, "B n T"]:
    return jax.vmap(lambda x, at: jnp.take(x, at, mode="clip"))(x, at)


def _numbers(x: jax.Array) -> Int32[Array, "B S"]:
    """The number of each entry along the last axis."""
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
