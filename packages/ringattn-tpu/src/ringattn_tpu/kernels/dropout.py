# SPDX-License-Identifier: Apache-2.0
"""Which probabilities of a tile dropout keeps: the bits are those of `ringattn_core.contract.dropout`."""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core.contract.dropout import draw_number, philox_2x32, threshold

from ..steps import PAIRED
from .scores import Part

_HALF: Final = np.int32(16)
"""The bits of half a word. With `jax_enable_x64`, Python's integers have 64 bits, which no shift of int32 takes."""


def kept(part: Part, weight: float) -> jax.Array:
    """`weight` for the probabilities that dropout keeps, and 0 for the others."""
    survives = jax.lax.cond(part.step.has(PAIRED), lambda: _by_pairs(part), lambda: _one_by_one(part))
    return jnp.where(survives != 0, weight, 0.0)


def _one_by_one(part: Part) -> jax.Array:
    """1 where dropout keeps a probability, else 0. Computes a Philox draw for every pair of query and key."""
    i, j = part.of_query("index"), part.of_key("index")
    words = _drawn(part, i, j)
    return _survives(part, _half(jnp.where(i & 8 == 0, words[0], words[1]), j))


def _by_pairs(part: Part) -> jax.Array:
    """Returns what `_one_by_one` returns, from half as many draws: rows 8 apart share a draw.

    The indices of the rows must be runs of 16 that begin at multiples of 16.
    """
    i, j = part.of_query("index"), part.of_key("index")
    if part.by_keys:
        first, second = (x.reshape(-1, 8, part.width) for x in _drawn(part, i, _first_rows(j)))
        word = jnp.where((i & 8 == 0)[None], first, second)
        halves = word & 0xFFFF, jax.lax.shift_right_logical(word, _HALF)
    else:
        words = _drawn(part, _first_rows(i), j)
        halves = tuple(_half(word, j).reshape(-1, 8, part.width) for word in words)
    return _survives(part, jnp.concatenate(halves, 1).reshape(part.height, part.width))


def _first_rows(own: jax.Array) -> jax.Array:
    """The first 8 of every 16 rows of `own`."""
    return own.reshape(-1, 16, own.shape[1])[:, :8].reshape(-1, own.shape[1])


def _drawn(part: Part, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two random words of the draw for each pair of query index `i` and key index `j`, as int32."""
    shape = jnp.broadcast_shapes(i.shape, j.shape)
    a, b = (_bits_as(jnp.broadcast_to(draw_number(x), shape), jnp.uint32) for x in (i, j))
    first, second = philox_2x32((a, b), _bits_as(part.inputs["dropout_key"][...], jnp.uint32))
    return _bits_as(first, jnp.int32), _bits_as(second, jnp.int32)


def _half(word: jax.Array, j: jax.Array) -> jax.Array:
    """The low 16 bits of each word, or the high 16 bits where bit 3 of the key index `j` is set."""
    return jnp.where(j & 8 == 0, word & 0xFFFF, jax.lax.shift_right_logical(word, _HALF))


def _survives(part: Part, half: jax.Array) -> jax.Array:
    return (half >= threshold(part.settings.rule.dropout_prob)).astype(jnp.int32)


def _bits_as(x: jax.Array, dtype: type) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)
