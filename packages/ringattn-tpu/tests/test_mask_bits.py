# SPDX-License-Identifier: Apache-2.0
"""Only masks that no range of keys describes take bits; a kernel reads each set of bits from one array."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from ringattn_core import masks, ring_attention
from ringattn_core.contract.bits import WORD, unpacked
from ringattn_tpu import mask_bits

LENGTH = 2**16


def words(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).integers(0, 2**32, shape, np.uint32))


@pytest.mark.parametrize(("tile", "rows_of_word"), [(128, 16), (256, 32), (384, 16)])
@pytest.mark.parametrize("by_keys", [False, True])
def test_a_word_holds_consecutive_rows_of_the_tile_that_a_kernel_keeps(by_keys: bool, tile: int, rows_of_word: int):
    given = words(2, 3, 2 * tile, 2 * tile // WORD)
    found = mask_bits.laid_out(given, by_keys, tile)
    assert mask_bits.bits(tile) == rows_of_word and found.shape == (2, 3, 2 * tile // rows_of_word, 2 * tile)
    bit = np.arange(rows_of_word)[:, None]
    rows = ((np.asarray(found)[:, :, :, None] >> bit) & 1).reshape(2, 3, 2 * tile, 2 * tile)
    want = unpacked(given, 2 * tile)
    np.testing.assert_array_equal(rows, jnp.swapaxes(want, 2, 3) if by_keys else want)


@pytest.mark.parametrize("by_keys", [False, True])
def test_words_are_laid_out_without_an_array_of_single_bits(by_keys: bool):
    shape = jax.ShapeDtypeStruct((1, 1, 2048, 2048 // WORD), jnp.uint32)
    made = jax.jit(lambda words: mask_bits.laid_out(words, by_keys, 256)).lower(shape).compile()
    held = made.memory_analysis()
    assert held is not None and held.temp_size_in_bytes < 2048 * 2048 / 2


def largest(jaxpr: Any) -> int:
    """The number of elements of the largest array in a program, with all programs inside it."""
    sizes = [x.aval.size for equation in jaxpr.eqns for x in equation.outvars]
    inner = [jaxpr for equation in jaxpr.eqns for jaxpr in jaxprs_in_params(equation.params)]
    return max([0, *sizes, *map(largest, inner)])


def largest_of_gradients(mask: masks.Mask) -> int:
    """The number of elements of the largest array in a call with this mask, and its gradients, over 64k tokens."""
    tokens = jax.ShapeDtypeStruct((1, LENGTH, 1, 8), jnp.bfloat16)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ring_attention(q, k, v, mask_builder=lambda *_: mask, backend="tpu").astype(jnp.float32).sum()

    return largest(jax.make_jaxpr(jax.grad(attend, (0, 1, 2)))(*[tokens] * 3).jaxpr)


INTERVALS = {
    "a causal window": masks.Causal() & masks.Local(4096, 0),
    "a prefix": masks.Prefix(1000) | masks.Causal(),
    "documents": masks.Document(np.arange(LENGTH) // 5000),
}


@pytest.mark.parametrize("mask", INTERVALS)
def test_a_mask_of_intervals_takes_no_array_of_the_square(mask: str):
    assert largest_of_gradients(INTERVALS[mask]) < LENGTH * 64


def test_a_mask_that_is_no_interval_takes_a_bit_a_pair():
    assert largest_of_gradients(masks.Predicate(lambda q, kv: (q - kv) % 2 == 0)) >= LENGTH * LENGTH // WORD
