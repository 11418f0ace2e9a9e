# SPDX-License-Identifier: Apache-2.0
"""Packs masks and chosen keys into words of 32 bits: which keys a query sees, a bit for each key or block of keys."""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from ..masks import Coordinates, Mask

WORD: Final = 32
"""The number of bits of a word. Bit `k` is bit `k % WORD` of word `k // WORD`."""
PAIRS_AT_ONCE: Final = 2**28
"""A mask is evaluated for at most so many pairs of a query and a key at a time. As booleans, these take 256 MiB, where
XLA does not fuse the mask with the packing."""
FEW: Final = 64
"""The most numbers of a row for which `of_numbers` compares each word with each number. Not measured: more than models
choose of blocks, fewer than they choose of single keys."""
MARKS_AT_ONCE: Final = 2**25
"""With more numbers, it marks them in so many booleans at a time, 32 MiB."""


class Bits(NamedTuple):
    """`m` sets of words, and the number of keys of a bit: bit `k` is for the keys from `k * grain` on (`Block.bits`).

    `of_head` has the number of each head's set. If it is `None`, head `n` of `N` has set `n * m // N`.
    """

    words: UInt32[Array, "b m T W"]
    of_head: Int32[Array, " N"] | None = None
    grain: int = 1


def of_masks(
    masks: Sequence[Mask],
    mask_of_head: Int32[Array, " N"] | None,
    dense: Bool[Array, "b n T S"] | None,
    q: Coordinates,
    kv: Coordinates,
) -> Bits | None:
    """The bits of the pairs that both `masks` and the `dense` mask allow; `None` without `masks` and `dense`.

    `mask_of_head` has the number of each head's mask in `masks`.
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
    return None if words is None else Bits(words, of_head)


def of_numbers(numbers: Int32[Array, "*rows n"], count: int) -> UInt32[Array, "*rows W"]:
    """The words of `count` bits in which the bits with these numbers are set. Other numbers, -1 too, set none."""
    inside = (numbers >= 0) & (numbers < count)
    return (_of_few if numbers.shape[-1] <= FEW else _of_many)(jnp.where(inside, numbers, count), count)


def _of_few(numbers: Int32[Array, "*rows n"], count: int) -> UInt32[Array, "*rows W"]:
    """XLA fuses this to one loop over the words of a row, which reads the row's numbers."""
    bit = jnp.where(numbers < count, jnp.uint32(1) << (numbers % WORD).astype(jnp.uint32), jnp.uint32(0))
    shape = (*numbers.shape[:-1], words_of(count), numbers.shape[-1])
    mine = numbers[..., None, :] // WORD == jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2)
    mine = jnp.where(mine, bit[..., None, :], jnp.uint32(0))
    return jax.lax.reduce(mine, np.uint32(0), jax.lax.bitwise_or, (numbers.ndim,))


def _of_many(numbers: Int32[Array, "*rows n"], count: int) -> UInt32[Array, "*rows W"]:
    """Marks the numbers of each row in an array of booleans, and packs it; of some rows at a time.

    For 2,048 keys of 32k, `_of_few` took 18 of the 60 ms of a call on an H200, by a profile of the case "DSA, 32k" of
    `benchmarks/selected_rivals.py`.
    """

    def of_row(numbers: jax.Array) -> jax.Array:
        return packed(jnp.zeros(count, bool).at[numbers].set(True, mode="drop"))

    for _ in numbers.shape[:-2]:  # not reshaped: a mesh axis may split the batch
        of_row = jax.vmap(of_row)
    at_once = max(MARKS_AT_ONCE // (count * math.prod(numbers.shape[:-2])), 1)
    return jnp.moveaxis(jax.lax.map(of_row, jnp.moveaxis(numbers, -2, 0), batch_size=at_once), 0, -2)


def both(a: Bits | None, b: Bits | None, heads: int, keys: int) -> Bits | None:
    """The pairs that both allow, for so many query heads and keys; `None` allows all. The grain divides both grains.

    Where heads have a set of their own in both, the result has a set for each head.
    """
    if a is None or b is None:
        return b if a is None else a
    grain = math.gcd(a.grain, b.grain)
    (a_words, b_words), of_head = (regrained(x, 0, keys, grain) for x in (a, b)), None
    if a_words.shape[1] > 1 and b_words.shape[1] > 1:
        a_words, b_words = (by_head(words, x.of_head, heads) for words, x in ((a_words, a), (b_words, b)))
    else:
        of_head = a.of_head if a_words.shape[1] > 1 else b.of_head
    return Bits(a_words & b_words, of_head, grain)


def by_head(sets: Shaped[Array, "b m *rest"], of_head: Int32[Array, " N"] | None, heads: int) -> jax.Array:
    """The set of each of so many heads, `[b, N, ...]`, or the only set, `[b, 1, ...]`."""
    if of_head is not None:
        return sets[:, of_head]
    return sets if sets.shape[1] == 1 else jnp.repeat(sets, heads // sets.shape[1], 1)


def regrained(bits: Bits, start: int, keys: int, grain: int) -> UInt32[Array, "b m T W"]:
    """The words of so many keys from key `start` on, with a bit for each `grain` keys.

    `grain` divides `bits.grain` and `start`.
    """
    if grain == bits.grain and start == 0:
        return bits.words
    return packed(unpacked(bits.words, -(-(start + keys) // grain), bits.grain // grain)[..., start // grain :])


def of_parts(words: UInt32[Array, "b m T W"], count: int, each: int) -> UInt32[Array, "b m T count words"]:
    """The words of each of `count` parts of the keys, which have `each` bits: a part begins with a word of its own."""
    return packed(unpacked(words, count * each).reshape(*words.shape[:3], count, each))


def unpacked(words: UInt32[Array, "*rows W"], length: int, grain: int = 1) -> Bool[Array, "*rows S"]:
    """Whether each of `length` keys has its bit set, as booleans; a bit is for `grain` keys."""
    bits = (words[..., None] >> _places(words.ndim)) & jnp.uint32(1)
    seen = bits.reshape(*words.shape[:-1], -1)[..., : -(-length // grain)] != 0
    return (seen if grain == 1 else jnp.repeat(seen, grain, -1))[..., :length]


def words_of(keys: int, grain: int = 1) -> int:
    """The number of words that hold the bits of so many keys."""
    return -(-keys // (WORD * grain))


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
