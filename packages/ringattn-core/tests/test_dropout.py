# SPDX-License-Identifier: Apache-2.0
"""Promises on dropout: Philox bit by bit, by global index, whatever the tile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.dropout import kept, philox, threshold
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule


def by_64_bits(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> np.ndarray:
    """Philox 4x32-10 with true 64-bit products: the words on the first axis."""
    low, shift = np.uint64(2**32 - 1), np.uint64(32)
    c = [np.asarray(x).astype(np.uint64) for x in np.broadcast_arrays(*counter)]
    for step in range(10):
        first = np.uint64((key[0] + step * 0x9E3779B9) % 2**32)
        second = np.uint64((key[1] + step * 0xBB67AE85) % 2**32)
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> shift) ^ c[1] ^ first, b & low, (a >> shift) ^ c[3] ^ second, a & low]
    return np.stack(c)


PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_philox_gives_the_published_words(counter, key, words) -> None:
    got = philox(tuple(np.uint32(x) for x in counter), tuple(np.uint32(x) for x in key))
    assert [hex(int(word)) for word in got] == [hex(word) for word in words]


def test_philox_agrees_with_64_bit_arithmetic() -> None:
    counter = tuple(np.random.default_rng(1).integers(0, 2**32, (4, 1000), dtype=np.uint32))
    got = jax.jit(philox)(counter, (np.uint32(12345), np.uint32(2**31 + 7)))
    np.testing.assert_array_equal(np.stack(got), by_64_bits(counter, (12345, 2**31 + 7)))


def _block(probability: float = 0.3) -> Block:
    """Shards, heads and batch rows from the middle of something larger; keys at a stride."""
    length, keys, heads, batch = 10, 14, 3, 2
    return Block(
        q=jnp.zeros((batch, length, heads, 1)),
        kv=jnp.zeros((2, batch, keys, 1, 1)),
        q_positions=jnp.zeros((1, length), jnp.int32),
        kv_positions=jnp.zeros((1, keys), jnp.int32),
        q_index=jnp.arange(70, 70 + length, dtype=jnp.int32)[None],
        kv_index=jnp.arange(5, 5 + 3 * keys, 3, dtype=jnp.int32)[None],
        batch_index=jnp.array([4, 9], jnp.int32),
        head_index=jnp.array([1, 0, 6], jnp.int32),
        q_segments=None, kv_segments=None, bias=None, mask=None, slopes=None,
        seed=jnp.array([3, 2**32 - 1], jnp.uint32),
        rule=Rule(1.0, dropout=probability),
    )  # fmt: skip


def test_each_pair_is_kept_by_its_global_indices_alone() -> None:
    block, got = _block(), np.asarray(kept(_block()))
    assert got.shape == (2, 3, 10, 14) and got.dtype == bool
    queries, keys = np.asarray(block.q_index[0])[:, None], np.asarray(block.kv_index[0])
    for b, batch, seed in ((0, 4, 3), (1, 9, 2**32 - 1)):
        for n, head in ((0, 1), (1, 0), (2, 6)):
            words = by_64_bits((keys // 4, queries, np.array(head), np.array(batch)), (seed, 0))
            word = np.take_along_axis(words, np.broadcast_to(keys % 4, (1, 10, 14)), 0)[0]
            np.testing.assert_array_equal(got[b, n], word >= int(0.3 * 2**32), f"{batch=} {head=}")


def test_a_tile_keeps_what_the_whole_keeps() -> None:
    whole, tile = np.asarray(kept(_block())), _block().tile(3, 5, 2, 7)
    np.testing.assert_array_equal(np.asarray(kept(tile)), whole[:, :, 3:8, 2:9])


@pytest.mark.parametrize("probability", [1e-9, 0.1, 0.5, 0.999999])
def test_the_threshold_is_the_probability_in_32_bits(probability: float) -> None:
    assert threshold(probability) == int(np.floor(np.float64(probability) * 2.0**32))
    assert 0 <= threshold(probability) < 2**32


def test_the_share_that_is_kept_is_one_minus_the_probability() -> None:
    block = dataclasses.replace(_block(0.25), q_index=jnp.arange(1000)[None], q=jnp.zeros((2, 1000, 3, 1)))
    share = np.asarray(kept(block)).mean((1, 2, 3))
    assert np.abs(share - 0.75).max() < 0.01 and share[0] != share[1], share
