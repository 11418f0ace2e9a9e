# SPDX-License-Identifier: Apache-2.0
"""Which pairs of tiles a kernel may skip, and which need no mask."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from ..masks import all_of
from .bits import WORD, Bits, by_head, regrained
from .protocol import Block

Ends = tuple[Any, Any]
"""The least and the greatest value of each tile, `[g, tiles]`."""


class Tiles(NamedTuple):
    """For each query tile and key tile: `some`, whether any head may see any pair; `full`, whether all heads see all.

    A kernel may skip a tile where `some` is false, and needs no mask where `full` is true. Both are conservative:
    `some` may be true where nothing is visible, `full` may be false where every pair is. `full` implies `some`. `g` is
    1 if nothing depends on the batch row, else `B`. `h` is `K` if key heads differ in `bits`: then both speak of the
    query heads that read one key head. Otherwise it is 1.
    """

    some: Bool[Array, "g h nq nk"]
    full: Bool[Array, "g h nq nk"]

    @property
    def of_all_heads(self) -> "Tiles":
        """The tiles of all heads together, with `h` 1."""
        return Tiles(self.some.any(1, keepdims=True), self.full.all(1, keepdims=True))


def tiles(block: Block, q_tile: int, kv_tile: int) -> Tiles:
    """The tiles of `block`, of `q_tile` queries by `kv_tile` keys; these divide its lengths (see `Block.padded_to`).

    Exact for a causal mask, for windows and chunks over consecutive positions, and for bits alone.
    """
    padding = _by_tile(block.kv_index < 0, kv_tile) if block.padded else None
    positions = _by_tile(block.kv_positions, kv_tile)
    # Padding repeats the last position: where positions are sorted, the last token of a tile bounds it all the same.
    kv_ends = _ends(positions if block.monotone else _unpadded(positions, padding), block.monotone)
    first, last = (None if x is None else _of_all_heads(x, q_tile, block.monotone) for x in (block.first, block.last))
    parts = overlaps(first, last, kv_ends)
    if block.q_segments is not None and block.kv_segments is not None:
        parts.append(_of_segments(block.q_segments, block.kv_segments, q_tile, kv_tile, padding))
    if padding is not None:
        parts.append((~padding.all(-1)[:, None, :], ~padding.any(-1)[:, None, :]))
    parts = [(some[:, None], full[:, None]) for some, full in parts]
    if block.bits is not None:
        parts.append(_of_bits(block, block.bits, q_tile, kv_tile))
    grid = jnp.ones((1, 1, block.q_length // q_tile, block.kv_length // kv_tile), bool)
    some, full = (all_of(part) for part in zip((grid, grid), *parts, strict=True))
    return Tiles(*jnp.broadcast_arrays(some, full))


def overlaps(first: Ends | None, last: Ends | None, keys: Ends) -> list[tuple[Any, Any]]:
    """Pairs `(some, full)` as in `Tiles`, one for each end of the intervals; they are ANDed.

    `first` has the least and the greatest first key position of each query tile, `last` those of the last key position;
    `None` is no bound. `keys` has the least and the greatest position of each key tile.
    """
    least, greatest = (x[..., None, :] for x in keys)
    parts = []
    if first is not None:
        lowest, highest = (x[..., None] for x in first)
        parts.append((greatest >= lowest, least >= highest))
    if last is not None:
        lowest, highest = (x[..., None] for x in last)
        parts.append((least <= highest, greatest <= lowest))
    return parts


def near_equal(length: int, longest: int, multiple: int = 1) -> int:
    """The tile size that cuts `length` into the fewest tiles of at most `longest`, all nearly equal.

    It is rounded up to a multiple of `multiple`, which must divide `longest`.
    """
    count = -(-length // longest)
    return -(-length // (count * multiple)) * multiple


def _by_tile(x: jax.Array, tile: int) -> jax.Array:
    return x.reshape(x.shape[0], -1, tile)


def _ends(by_tile: jax.Array, sorted_tokens: bool) -> Ends:
    """The least and the greatest value of each tile: its first and its last value if tokens are sorted."""
    return (by_tile[..., 0], by_tile[..., -1]) if sorted_tokens else (by_tile.min(-1), by_tile.max(-1))


def _of_all_heads(x: Int32[Array, "b n T"], tile: int, sorted_tokens: bool) -> Ends:
    """The least and the greatest value of each tile over all heads."""
    if x.shape[1] == 1:
        return _ends(_by_tile(x[:, 0], tile), sorted_tokens)
    by_tile = x.reshape(*x.shape[:2], -1, tile)
    return by_tile.min((1, 3)), by_tile.max((1, 3))


def _unpadded(x: jax.Array, padding: jax.Array | None) -> jax.Array:
    """Gives padding keys the value of the first key of their tile, so that they do not widen the tile's bounds."""
    return x if padding is None else jnp.where(padding, x[..., :1], x)


def _of_segments(
    q_ids: jax.Array, kv_ids: jax.Array, q_tile: int, kv_tile: int, padding: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`(some, full)` of "equal ids, not negative": `some` where the ranges of ids overlap."""
    q = _by_tile(q_ids, q_tile)
    kv = _unpadded(_by_tile(kv_ids, kv_tile), padding)
    low, high = q.min(-1)[:, :, None], q.max(-1)[:, :, None]
    kv_low, kv_high = kv.min(-1)[:, None, :], kv.max(-1)[:, None, :]
    some = (kv_low <= high) & (kv_high >= low) & (high >= 0) & (kv_high >= 0)
    return some, (low == high) & (kv_low == kv_high) & (low == kv_low) & (low >= 0)


def _of_bits(block: Block, words: jax.Array, q_tile: int, kv_tile: int) -> tuple[jax.Array, jax.Array]:
    """`(some, full)` of each key head: any bit, and all bits, in any set of its query heads."""
    by_tile = words.reshape(*words.shape[:2], -1, q_tile, words.shape[3])
    some, full = (
        _of_keys(jax.lax.reduce(by_tile, np.uint32(neutral), combine, (3,)), block, kv_tile, combine, neutral)
        for combine, neutral in ((jax.lax.bitwise_or, 0), (jax.lax.bitwise_and, 2**32 - 1))
    )
    return _of_key_heads(some != 0, block, jnp.any), _of_key_heads(full == np.uint32(2**32 - 1), block, jnp.all)


def _of_keys(words: jax.Array, block: Block, kv_tile: int, combine: Any, neutral: int) -> jax.Array:
    """Combines the bits of each key tile to a word, `[b m nq nk]`; `kv_tile` divides the number of keys."""
    grain = math.gcd(block.grain, kv_tile)
    if grain < block.grain:  # a bit is for keys of several tiles
        words = regrained(Bits(words, None, block.grain), 0, block.kv_length, grain)
    keys, kv_tile = block.kv_length // grain, kv_tile // grain  # counted in bits
    if (size := math.gcd(kv_tile, WORD)) < WORD:  # cut words into parts that belong to one tile each
        starts = jnp.arange(0, WORD, size, dtype=jnp.uint32).reshape(1, 1, 1, 1, -1)
        ones = jnp.uint32(2**size - 1)
        parts = (words[..., None] >> starts) & ones
        words = (parts | ~ones if neutral else parts).reshape(*words.shape[:3], -1)[..., : keys // size]
    by_tile = words.reshape(*words.shape[:3], keys // kv_tile, -1)
    return jax.lax.reduce(by_tile, np.uint32(neutral), combine, (4,))


def _of_key_heads(of_set: jax.Array, block: Block, combine: Any) -> jax.Array:
    """`[b h nq nk]` from `[b m nq nk]`: combines the sets of the query heads that read a key head."""
    if of_set.shape[1] == 1 or (block.bits_of_head is None and of_set.shape[1] == block.kv_heads):
        return of_set
    of_heads = by_head(of_set, block.bits_of_head, block.q.shape[2])
    return combine(of_heads.reshape(len(of_set), block.kv_heads, block.group, *of_set.shape[2:]), 2)
