# SPDX-License-Identifier: Apache-2.0
"""Packs masks that a kernel cannot compute itself into the bits of words.

A kernel keeps a tile of queries, or of keys; the bits of a word belong to consecutive rows of this tile. Word `w` holds
the rows from `w * bits` on, the first in bit 0. A kernel unpacks a word to rows by shifts; bits along the lanes would
need a gather.
"""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.visibility import visible

from .block_sizes import SUBLANES

PAIRS_AT_ONCE: Final = 2**26
"""The most (query, key) pairs whose masks are evaluated at a time."""


def bits(tile: int) -> int:
    """The number of rows in a word, 32 or 16, so that the words of `tile` rows fill whole vector registers."""
    return 32 if tile % (32 * SUBLANES) == 0 else 16


def of(block: Block, by_keys: bool, tile: int) -> Int32[Array, "b n words other"]:
    """Packs the masks of `mask_builder` and the dense mask to words. Bits run along queries, or keys if `by_keys`.

    `tile` is the length of a tile of the side along which bits run. `other` is the length of the other side.
    The batch axis is 1 if no mask depends on the batch, and the head axis is 1 if all heads have the same mask.
    """
    rule = block.rule
    bare = dataclasses.replace(rule, causal=False, sliding_window=None, chunk_size=None)
    masked = dataclasses.replace(block, rule=bare, q_segments=None, kv_segments=None, padded=False)
    count = bits(tile)
    length = block.kv_length if by_keys else block.q_length
    other = block.q_length if by_keys else block.kv_length
    heads = max(1 if block.mask is None else block.mask.shape[1], 1 if len(rule.masks) <= 1 else block.q.shape[2])
    rows = max(PAIRS_AT_ONCE // (other * heads * count), 1) * count
    rows = next(n for n in range(min(rows, length), 0, -count) if length % n == 0)

    def some(number: jax.Array) -> jax.Array:
        cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, number * rows, rows, axis)  # noqa: E731
        seen = visible(masked.map_keys(cut) if by_keys else masked.map_queries(cut))
        assert seen is not None
        seen = jnp.swapaxes(seen, 2, 3) if by_keys else seen
        return _packed(jnp.broadcast_to(seen, (*seen.shape[:2], rows, other)), count)

    packed = jax.lax.map(some, jnp.arange(length // rows, dtype=jnp.int32))
    return jnp.moveaxis(packed, 0, 2).reshape(*packed.shape[1:3], length // count, other)


def _packed(seen: jax.Array, count: int) -> jax.Array:
    """Packs each `count` consecutive rows of booleans to a word. XLA fuses it with the mask, and stores no booleans."""
    weights = (jnp.uint32(1) << jnp.arange(count, dtype=jnp.uint32))[:, None]
    cut = seen.reshape(*seen.shape[:2], -1, count, seen.shape[3])
    words = jnp.where(cut, weights, jnp.uint32(0)).sum(3, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)
