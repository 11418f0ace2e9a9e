# SPDX-License-Identifier: Apache-2.0
"""Which probabilities are dropped: Philox 4x32-10 by global index, the same bits on every ring, tile and backend."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from .protocol import Block

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[UInt32[Array, "..."], UInt32[Array, "..."], UInt32[Array, "..."], UInt32[Array, "..."]]


def threshold(probability: float) -> int:
    """A word is kept where it is at least this."""
    return math.floor(probability * 2**32)


def kept(block: Block) -> Bool[Array, "B N T S"]:
    """Which probabilities of the block, or of a tile of it, survive; needs a seed and `0 < rule.dropout < 1`.

    Word `j % 4` of the counter `(j // 4, i, head, batch)` under the key `(seed, 0)` decides for query `i` and key `j`.
    Every key draws for itself: four could share one call, but to interleave their words costs XLA more than the calls.
    """
    assert block.seed is not None
    head, batch = _unsigned(block.head_index)[None, :, None, None], _unsigned(block.batch_index)[:, None, None, None]
    query, seed = _unsigned(block.q_index)[:, None, :, None], block.seed[:, None, None, None]
    least = jnp.uint32(threshold(block.rule.dropout))
    key = _unsigned(block.kv_index)[:, None, None, :]
    words = philox((key >> 2, query, head, batch), (seed, jnp.uint32(0)))
    shape, which = (block.q.shape[0], block.q.shape[2], block.q_length, block.kv_length), key & 3
    low, high = jnp.where(which == 0, words[0], words[1]), jnp.where(which == 2, words[2], words[3])
    return jnp.broadcast_to(jnp.where(which < 2, low, high) >= least, shape)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> Words:
    """Philox 4x32-10 of Salmon et al. (2011): four random words for each counter; all of uint32, broadcast."""
    a, b, c, d = (jnp.asarray(x, jnp.uint32) for x in counter)
    first, second = (jnp.asarray(x, jnp.uint32) for x in key)
    for step in range(_ROUNDS):
        if step:
            first, second = first + jnp.uint32(_WEYL[0]), second + jnp.uint32(_WEYL[1])
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
    return a, b, c, d


def _product(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """The high and the low word of a 64-bit product, by 16-bit halves: there is no uint64 without x64."""
    high, low = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    x_high, x_low = x >> 16, x & 0xFFFF
    bottom = x_low * low
    middle = x_high * low + (bottom >> 16)
    across = x_low * high + (middle & 0xFFFF)
    return x_high * high + (middle >> 16) + (across >> 16), x * jnp.uint32(factor)


def _unsigned(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint32)
