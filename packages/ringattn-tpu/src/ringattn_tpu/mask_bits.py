# SPDX-License-Identifier: Apache-2.0
"""Lays out the mask bits of a block as kernels read them.

Bits for single keys: a kernel keeps a tile of queries, or of keys; the bits of a word belong to consecutive rows of
this tile. Word `w` holds the rows from `w * bits` on, the first in bit 0. A kernel unpacks a word to rows by shifts;
bits along the lanes would need a gather.

Bits for blocks of keys: a query has words of its own for each tile of keys, as a number along the queries. A kernel
shifts them by the number of the block in which a key lies.
"""

import dataclasses
import math
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32
from ringattn_core.contract.bits import WORD, Bits, of_parts, regrained
from ringattn_core.contract.protocol import Block

from .block_sizes import LANES, SUBLANES

_LEAST_GRAIN: Final = LANES // WORD
"""The keys of a bit are a multiple of this: then the keys of a word fill whole registers."""


def bits(tile: int) -> int:
    """The number of rows in a word, 32 or 16, so that the words of `tile` rows fill whole vector registers."""
    return WORD if tile % (WORD * SUBLANES) == 0 else WORD // 2


def laid_out(words: UInt32[Array, "b m T W"], by_keys: bool, tile: int) -> Int32[Array, "b m rows other"]:
    """Words whose bits run along queries, or along keys if `by_keys`, from `words` (`Block.bits`) of whole words.

    `tile` is the length of a tile of the side along which bits run; the other side lies along the last axis.
    """
    words = jnp.swapaxes(words, 2, 3) if by_keys else _along_queries(words)
    if bits(tile) < WORD:
        halves = jnp.stack([words & 0xFFFF, words >> 16], 3)
        words = halves.reshape(*words.shape[:2], -1, words.shape[3])
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def with_grain(block: Block, kv_tile: int) -> Block:
    """The block with a grain that divides tiles of keys, or with a bit for each key."""
    grain = math.gcd(block.grain, kv_tile)
    grain = grain if grain % _LEAST_GRAIN == 0 else 1
    if block.bits is None or grain == block.grain:
        return block
    words = regrained(Bits(block.bits, None, block.grain), 0, block.kv_length, grain)
    return dataclasses.replace(block, bits=words, grain=grain)


def of_tiles(words: UInt32[Array, "b m T W"], tiles: int, each: int) -> Int32[Array, "b m tiles words T"]:
    """The words of each query for each of `tiles` tiles of keys, which have `each` bits."""
    return jax.lax.bitcast_convert_type(jnp.moveaxis(of_parts(words, tiles, each), 2, 4), jnp.int32)


def _along_queries(words: UInt32[Array, "b m T W"]) -> UInt32[Array, "b m rows S"]:
    """Transposes each square of 32 queries by 32 keys. XLA fuses this to one loop, which stores no single bits."""
    shape = (*words.shape[:2], words.shape[2] // WORD, WORD, words.shape[3], WORD)
    query, key = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (3, 5))
    bits_of_keys = (words.reshape(*shape[:-1], 1) >> key) & 1
    return (bits_of_keys << query).sum(3, dtype=jnp.uint32).reshape(*shape[:3], -1)
