# SPDX-License-Identifier: Apache-2.0
"""Masks that no kernel computes arrive bit by bit, along whichever side the kernel keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.protocol import Block
from ringattn_core.masks import Numpy, Predicate
from ringattn_tpu import mask_bits
from tpu_blocks import dense_mask, make_block, seen_pairs


def unpacked(packed: jax.Array, count: int) -> np.ndarray:
    """`[b, n, own, other]`."""
    bits = (np.asarray(packed)[:, :, :, None, :] >> np.arange(count, dtype=np.int32)[:, None]) & 1
    return bits.reshape(*packed.shape[:2], -1, packed.shape[3]).astype(bool)


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


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_bits_hold_the_truth_of_every_pair_along_the_kernels_own_side(mask: str, by_keys: bool):
    block = block_of(mask)
    expected = seen_pairs(block).swapaxes(2, 3) if by_keys else seen_pairs(block)
    packed = mask_bits.of(block, by_keys, 128 if by_keys else 256)
    assert packed.dtype == jnp.int32
    found = unpacked(packed, 16 if by_keys else 32)
    np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)


@pytest.mark.parametrize(
    ("mask", "rows", "heads"),
    [("dense", 1, 1), ("dense of rows", 2, 1), ("dense of heads", 1, 4), ("of the algebra", 1, 1), ("of heads", 1, 4),
     ("of heads and dense", 2, 4)],
)  # fmt: skip
def test_rows_and_heads_that_see_the_same_share_their_bits(mask: str, rows: int, heads: int):
    assert mask_bits.of(block_of(mask), False, 256).shape == (rows, heads, 768 // 32, 256)


def test_what_a_kernel_computes_by_itself_is_not_in_the_bits():
    given = {"causal": True, "sliding_window": (9, 3), "q_segments": np.zeros((2, 256), np.int32)}
    given["kv_segments"] = np.ones((2, 256), np.int32)
    block = make_block(q_length=256, kv_length=256, heads=4, **MASKS["dense"](256, 256), **given)
    found = unpacked(mask_bits.of(block, False, 256), 32)
    np.testing.assert_array_equal(found, dense_mask(1, 1, 256, 256))


def test_a_predicate_need_not_look_at_its_arguments():
    masks = (Predicate(lambda q, kv: True), Predicate(lambda q, kv: kv < 5))
    block = make_block(1, 128, 128, masks=masks, mask_of_head=(0, 1))
    found = unpacked(mask_bits.of(block, False, 128), 16)
    np.testing.assert_array_equal(found[0], np.stack([np.ones((128, 128)), np.tile(np.arange(128) < 5, (128, 1))]))


@pytest.mark.parametrize("by_keys", [False, True])
def test_bits_are_made_without_a_truth_value_for_each_pair(by_keys: bool, monkeypatch: pytest.MonkeyPatch):
    block = block_of("of heads", 1024, 1024)
    whole = mask_bits.of(block, by_keys, 256)
    monkeypatch.setattr(mask_bits, "PAIRS_AT_ONCE", 2**15)
    made = jax.jit(lambda block: mask_bits.of(block, by_keys, 256)).lower(block).compile()
    np.testing.assert_array_equal(made(block), whole)
    held = made.memory_analysis()
    assert held is not None and held.temp_size_in_bytes < 4 * 1024 * 1024 / 2
