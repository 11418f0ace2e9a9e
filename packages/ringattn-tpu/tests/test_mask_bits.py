# SPDX-License-Identifier: Apache-2.0
"""Only masks that no range of keys describes take bits; a kernel reads each set of bits from one array."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_blocks import random_mask as dense_mask
from ringattn_core import masks, ring_attention
from ringattn_core.contract.bits import WORD, unpacked
from ringattn_tpu import mask_bits

LENGTH = 2**16


def words(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).integers(0, 2**32, shape, np.uint32))


@pytest.mark.parametrize(("tile", "rows_of_word"), [(128, 16), (256, 32), (384, 16), (1024, 32)])
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
    sizes = [value.aval.size for equation in jaxpr.eqns for value in equation.outvars if hasattr(value.aval, "size")]
    return max([0, *sizes, *map(largest, jax.core.jaxprs_in_params_of(jaxpr))])


def gradients_of(mask: masks.Mask) -> Any:
    """The program of a call with this mask and of its gradients, for a shard of 64k tokens."""
    tokens = jax.ShapeDtypeStruct((1, LENGTH, 1, 8), jnp.bfloat16)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ring_attention(q, k, v, mask_builder=lambda *_: mask, backend="tpu").astype(jnp.float32).sum()

    return jax.make_jaxpr(jax.grad(attend, (0, 1, 2)))(*[tokens] * 3)
