# SPDX-License-Identifier: Apache-2.0
"""Packs masks that kernels cannot compute into words of 32 bits: each query has a bit for key `j`, bit `j % 32`."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32
from ringattn_core.contract.protocol import Block
from ringattn_core.masks import Coordinates, Mask

BITS: Final = 32
PAIRS_AT_ONCE: Final = 2**28
"""The most pairs of a query and a key that are evaluated at a time, for a mask that XLA might not fuse with the
packing."""


def of_block(block: Block) -> tuple[UInt32[Array, "b m T W"], Int32[Array, " N"] | None]:
    """The masks of a block packed in words of 32 keys, and for each head the number of its mask.

    The numbers are `None` if every head has its own mask, or if all heads share one. If the block has both a dense mask
    and masks in its rule, the mask of each head is the AND of both.
    """
    if not block.rule.masks:
        return of_dense(block), None
    words, mask_of_head = of_rule(block)
    if block.mask is None:
        return words, mask_of_head
    return (words if mask_of_head is None else words[:, mask_of_head]) & of_dense(block), None


def of_rule(block: Block) -> tuple[UInt32[Array, "b m T W"], Int32[Array, " N"] | None]:
    """The packed words of each mask of the rule, and each head's number of a mask (`None` if the rule has one mask)."""
    rule = block.rule
    q = Coordinates(block.q_positions, block.q_index)
    kv = Coordinates(*(_by_word(x, "edge") for x in (block.kv_positions, block.kv_index)))
    each = [_of_mask(mask, q, kv) for mask in rule.masks]
    batch = max(x.shape[0] for x in each)
    packed = jnp.stack([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in each], 1)
    if len(rule.masks) == 1:
        return packed, None
    return packed, jnp.asarray(rule.mask_of_head, jnp.int32)[block.head_index]


def _of_mask(mask: Mask, q: Coordinates, kv: Coordinates) -> UInt32[Array, "b T W"]:
    """The packed words of `mask`: bit `b` of a word says whether a query sees key `b` of the word's keys.

    The coordinates `kv` of keys are grouped by word (`_by_word`). If XLA might not fuse the mask, only some queries are
    computed at a time. The loop sets one bit of every word at a time: XLA then computes only once what all keys of a
    word have in common. A sum of the bits across threads took three times as long on an H200.
    """

    def of_rows(q: Coordinates) -> Any:
        rows = Coordinates(*(x[:, :, None] for x in q))
        words: Any = jnp.zeros((1, q.index.shape[1], kv.index.shape[1]), jnp.uint32)
        for bit in range(BITS):
            seen = mask.visible(rows, Coordinates(*(x[:, None, :, bit] for x in kv)))
            words = words | jnp.where(seen, jnp.uint32(1 << bit), jnp.uint32(0))
        return words

    length = q.index.shape[1]
    rows = max(PAIRS_AT_ONCE // (kv.index.shape[1] * BITS), 1)
    if mask.bounded or length <= rows:
        return of_rows(q)
    batch = max(x.shape[0] for x in q)
    whole = (jnp.broadcast_to(x, (batch, length)) for x in q)
    cut = (jnp.pad(x, [(0, 0), (0, -length % rows)], mode="edge").reshape(batch, -1, rows) for x in whole)
    words = jax.lax.map(of_rows, Coordinates(*(jnp.swapaxes(x, 0, 1) for x in cut)))
    return jnp.swapaxes(words, 0, 1).reshape(words.shape[1], -1, words.shape[3])[:, :length]


def of_dense(block: Block) -> UInt32[Array, "b n T W"]:
    """The packed words of the dense mask. XLA sums the bits while it reads the mask, without a copy of the mask."""
    assert block.mask is not None
    bits = jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)
    return jnp.where(_by_word(block.mask, "constant"), bits, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)


def _by_word(x: Array, mode: str) -> Array:
    """Cuts the last axis into words of 32; fills the last word by `jnp.pad` with `mode`, but no kernel reads that."""
    more = -x.shape[-1] % BITS
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], mode=mode) if more else x
    return padded.reshape(*x.shape[:-1], -1, BITS)
