# SPDX-License-Identifier: Apache-2.0
"""How masks that kernels cannot compute reach them: a bit for each pair, 32 keys to a word, key `j` in bit `j % 32`."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32
from ringattn_core.contract.protocol import Block
from ringattn_core.masks import Coordinates, Mask

BITS: Final = 32
PAIRS_AT_ONCE: Final = 2**28
"""How many pairs of a mask that is not made of comparisons are looked at before the next."""


def of_rule(block: Block) -> tuple[UInt32[Array, "b m T W"], Int32[Array, " N"] | None]:
    """The words of each mask of the rule, and which of them each head of the block obeys (`None`: the only one)."""
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
    """The words of one mask, keys given by word; of one that XLA might not fuse, some rows after the other.

    A bit after the other: what of a mask is the same for all keys of a word is then computed once for them all, and
    nothing is summed across threads, which on an H200 takes three times as long.
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
    """The words of the dense mask. Its bits are summed where they are read, so that no copy of it comes to be."""
    assert block.mask is not None
    bits = jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)
    return jnp.where(_by_word(block.mask, "constant"), bits, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)


def _by_word(x: Array, mode: str) -> Array:
    """The last axis cut into words; what fills the last word is never read."""
    more = -x.shape[-1] % BITS
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], mode=mode) if more else x
    return padded.reshape(*x.shape[:-1], -1, BITS)
