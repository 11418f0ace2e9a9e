# SPDX-License-Identifier: Apache-2.0
"""Packs masks that are no intervals into words of 32 keys: a bit for each pair of a query and a key."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from ..masks import Coordinates, Mask

WORD: Final = 32
"""The number of keys of a word. Key `j` has bit `j % WORD` of word `j // WORD`."""
PAIRS_AT_ONCE: Final = 2**28
"""A mask is evaluated for at most so many pairs of a query and a key at a time. As booleans, these take 256 MiB, where
XLA does not fuse the mask with the packing."""


def of_masks(
    masks: Sequence[Mask],
    mask_of_head: Int32[Array, " N"] | None,
    dense: Bool[Array, "b n T S"] | None,
    q: Coordinates,
    kv: Coordinates,
) -> tuple[UInt32[Array, "b m T W"] | None, Int32[Array, " N"] | None]:
    """The sets of words of the pairs that both `masks` and the `dense` mask allow, and the number of each head's set.

    `mask_of_head` has the number of each head's mask in `masks`. The words are `None` without `masks` and `dense`, and
    the numbers are `None` if all heads share one set.
    """
    words = None if dense is None else packed(dense)
    of_head = None if dense is None or dense.shape[1] == 1 else jnp.arange(dense.shape[1], dtype=jnp.int32)
    if masks:
        each = [_of_mask(mask, q, kv) for mask in masks]
        batch = max(len(x) for x in each)
        stacked = jnp.stack([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in each], 1)
        own = None if len(masks) == 1 else mask_of_head
        if words is None or of_head is None:
            words, of_head = stacked if words is None else stacked & words, own
        else:
            words = words & (stacked if own is None else stacked[:, own])
    return words, of_head


def unpacked(words: UInt32[Array, "*rows W"], length: int) -> Bool[Array, "*rows S"]:
    """The bits of the first `length` keys as booleans."""
    bits = (words[..., None] >> _places(words.ndim)) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :length] != 0


def words_of(keys: int) -> int:
    """The number of words that hold so many keys."""
    return -(-keys // WORD)


def _of_mask(mask: Mask, q: Coordinates, kv: Coordinates) -> UInt32[Array, "b T W"]:
    """The words of `mask`, of some queries at a time if there are many pairs.

    The loop sets one bit of every word at a time: XLA then computes only once what all keys of a word have in common. A
    sum of the bits across threads took three times as long on an H200.
    """
    q, kv = Coordinates(*map(jnp.asarray, q)), Coordinates(*(_by_word(x, "edge") for x in kv))

    def of_rows(q: Coordinates) -> Any:
        rows = Coordinates(*(x[:, :, None] for x in q))
        words: Any = jnp.zeros((1, q.index.shape[1], kv.index.shape[1]), jnp.uint32)
        for bit in range(WORD):
            seen = mask.visible(rows, Coordinates(*(x[:, None, :, bit] for x in kv)))
            words = words | jnp.where(seen, jnp.uint32(1 << bit), jnp.uint32(0))
        return words

    length = q.index.shape[1]
    rows = max(PAIRS_AT_ONCE // (kv.index.shape[1] * WORD), 1)
    if length <= rows:
        return of_rows(q)
    batch = max(len(x) for x in q)
    whole = (jnp.broadcast_to(x, (batch, length)) for x in q)
    cut = (jnp.pad(x, [(0, 0), (0, -length % rows)], mode="edge").reshape(batch, -1, rows) for x in whole)
    words = jax.lax.map(of_rows, Coordinates(*(jnp.swapaxes(x, 0, 1) for x in cut)))
    return jnp.swapaxes(words, 0, 1).reshape(words.shape[1], -1, words.shape[3])[:, :length]


def packed(seen: Bool[Array, "*rows S"]) -> UInt32[Array, "*rows W"]:
    """Packs booleans along their last axis. XLA sums the bits while it reads the booleans, without a copy of them."""
    bits = jnp.uint32(1) << _places(seen.ndim)
    return jnp.where(_by_word(seen, "constant"), bits, jnp.uint32(0)).sum(-1, dtype=jnp.uint32)


def _places(before: int) -> UInt32[Array, "..."]:
    """The numbers of the bits of a word along the last axis, after so many axes of length 1."""
    return jnp.arange(WORD, dtype=jnp.uint32).reshape(*[1] * before, WORD)


def _by_word(x: Any, mode: str) -> jax.Array:
    """Cuts the last axis into words; fills the last one by `jnp.pad` with `mode`, but nothing reads that."""
    more = -x.shape[-1] % WORD
    whole = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], mode=mode) if more else jnp.asarray(x)
    return whole.reshape(*x.shape[:-1], -1, WORD)
