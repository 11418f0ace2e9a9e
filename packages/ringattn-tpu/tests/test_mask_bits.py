# SPDX-License-Identifier: Apache-2.0
"""Masks that no kernel computes arrive bit by bit, and rows and heads that see the same share their bits."""

import jax
import numpy as np
import pytest
from random_blocks import random_mask as dense_mask
from ringattn_core.contract.protocol import Block
from ringattn_core.masks import Numpy
from ringattn_tpu import mask_bits
from tpu_blocks import make_block


def masks_of_heads(q_length: int, kv_length: int) -> dict:
    return {"masks": tuple(Numpy(part) for part in dense_mask(2, q_length, kv_length)), "mask_of_head": (1, 0, 0, 1)}


MASKS = {
    "dense": lambda t, s: {"mask": dense_mask(1, 1, t, s)},
    "dense of rows": lambda t, s: {"mask": dense_mask(2, 1, t, s)},
    "dense of heads": lambda t, s: {"mask": dense_mask(1, 4, t, s)},
    "of the algebra": lambda t, s: {"masks": (Numpy(dense_mask(t, s)),), "mask_of_head": (0, 0, 0, 0)},
    "of heads": masks_of_heads,
    "of heads and dense": lambda t, s: {**masks_of_heads(t, s), "mask": dense_mask(2, 4, t, s)},
}


def block_of(mask: str, q_length: int = 768, kv_length: int = 256) -> Block:
    return make_block(q_length=q_length, kv_length=kv_length, heads=4, **MASKS[mask](q_length, kv_length))


@pytest.mark.parametrize(
    ("mask", "rows", "heads"),
    [("dense", 1, 1), ("dense of rows", 2, 1), ("dense of heads", 1, 4), ("of the algebra", 1, 1), ("of heads", 1, 4),
     ("of heads and dense", 2, 4)],
)  # fmt: skip
def test_rows_and_heads_that_see_the_same_share_their_bits(mask: str, rows: int, heads: int):
    assert mask_bits.of(block_of(mask), False, 256).shape == (rows, heads, 768 // 32, 256)


@pytest.mark.parametrize("by_keys", [False, True])
def test_bits_are_made_without_a_truth_value_for_each_pair(by_keys: bool, monkeypatch: pytest.MonkeyPatch):
    block = block_of("of heads", 1024, 1024)
    whole = mask_bits.of(block, by_keys, 256)
    monkeypatch.setattr(mask_bits, "PAIRS_AT_ONCE", 2**15)
    made = jax.jit(lambda block: mask_bits.of(block, by_keys, 256)).lower(block).compile()
    np.testing.assert_array_equal(made(block), whole)
    held = made.memory_analysis()
    assert held is not None and held.temp_size_in_bytes < 4 * 1024 * 1024 / 2
