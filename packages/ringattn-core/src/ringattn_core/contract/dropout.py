# SPDX-License-Identifier: Apache-2.0
"""Which probabilities dropout keeps: Philox by global index, so the bits are the same on every ring, tile and backend.

A draw, the two 32-bit words of one Philox call, serves four entries: `(i, j)`, `(i, j + 8)`, `(i + 8, j)` and
`(i + 8, j + 8)`, where `i % 16 < 8` and `j % 16 < 8`. Each takes 16 of the bits.
"""

import math
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from .protocol import Block

LEVELS: Final = 2**16
"""The number of values of an entry's 16 random bits."""
_MULTIPLIERS_4X32: Final = (0xD2511F53, 0xCD9E8D57)
_MULTIPLIER_2X32: Final = 0xD256D193
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)

Word = UInt32[Array, "..."]


def threshold(probability: float) -> int:
    """The least value of an entry's 16 random bits that keeps the entry, if `probability` is that of dropping it."""
    return math.floor(probability * LEVELS)


def kept(block: Block) -> Bool[Array, "B N T S"]:
    """True for the entries of `block` that dropout keeps; needs a seed and `0 < rule.dropout_prob < 1`."""
    i, j = _unsigned(block.q_index)[:, None, :, None], _unsigned(block.kv_index)[:, None, None, :]
    words = philox_2x32((draw_number(i), draw_number(j)), keys(block)[:, :, None, None])
    shape = (block.q.shape[0], block.q.shape[2], block.q_length, block.kv_length)
    return jnp.broadcast_to(survives(words, i, j, block.rule.dropout_prob), shape)


def keys(block: Block) -> UInt32[Array, "B N"]:
    """The Philox 2x32 key of each batch row and head of `block`."""
    assert block.seed is not None
    head, batch = _unsigned(block.head_index)[None, :], _unsigned(block.batch_index)[:, None]
    # Without a barrier, XLA's simplifier goes in circles and logs an error if all rows have one index and one seed.
    seed = jax.lax.optimization_barrier(block.seed)[:, None]
    return philox_4x32((head, batch, 0, 0), (seed, 0))[0]


def draw_number(index: Word) -> Word:
    """The Philox counter word of each query or key `index`. Indices `i` and `i + 8` share a word if `i % 16 < 8`."""
    return ((index >> 4) << 3) | (index & 7)


def survives(words: tuple[Word, Word], i: Word, j: Word, probability: float) -> Bool[Array, "..."]:
    """Whether dropout with this `probability` keeps entry `(i, j)`, given `words`, the two words of its draw."""
    word = jnp.where(i & 8 == 0, words[0], words[1])
    half = jnp.where(j & 8 == 0, word & 0xFFFF, word >> 16)
    return half >= jnp.uint32(threshold(probability))


def philox_2x32(counter: tuple[Any, Any], key: Any) -> tuple[Word, Word]:
    """Philox 2x32-7 of Salmon et al. (2011): two random words for each `counter`, a pair of words, and each `key`.

    The arguments are converted to uint32, and broadcast.
    """
    a, b, key = (jnp.asarray(x, jnp.uint32) for x in (*counter, key))
    for step in range(7):
        high, low = _product(a, _MULTIPLIER_2X32)
        a, b = high ^ _stepped(key, step, 0) ^ b, low
    return a, b


def philox_4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Word, Word, Word, Word]:
    """Philox 4x32-10 of Salmon et al. (2011): four random words for each `counter` of four words and `key` of two.

    The arguments are converted to uint32, and broadcast.
    """
    a, b, c, d, first, second = (jnp.asarray(x, jnp.uint32) for x in (*counter, *key))
    for step in range(10):
        high_a, low_a = _product(a, _MULTIPLIERS_4X32[0])
        high_c, low_c = _product(c, _MULTIPLIERS_4X32[1])
        a, b, c, d = high_c ^ b ^ _stepped(first, step, 0), low_c, high_a ^ d ^ _stepped(second, step, 1), low_a
    return a, b, c, d


def _stepped(key: Word, step: int, number: int) -> Word:
    return key + jnp.uint32(step * _KEY_STEPS[number] % 2**32)


def _product(x: Word, factor: int) -> tuple[Word, Word]:
    """The high and the low word of a 64-bit product, from 16-bit halves: JAX has uint64 only with `jax_enable_x64`."""
    high, low = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    x_high, x_low = x >> 16, x & 0xFFFF
    bottom = x_low * low
    middle = x_high * low + (bottom >> 16)
    across = x_low * high + (middle & 0xFFFF)
    return x_high * high + (middle >> 16) + (across >> 16), x * jnp.uint32(factor)


def _unsigned(x: jax.Array) -> Word:
    return x.astype(jnp.uint32)
