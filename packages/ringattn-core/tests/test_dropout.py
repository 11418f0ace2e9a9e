# SPDX-License-Identifier: Apache-2.0
"""Promises of dropout: Philox bit for bit, by global index, equal for every tile size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.dropout import kept, keys, philox_2x32, philox_4x32, threshold
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule


def in_python(counter: tuple[int, int], key: int) -> tuple[int, int]:
    """Philox 2x32-7 in Python, whose integers hold 64-bit products."""
    a, b = counter
    for step in range(7):
        high, low = divmod(0xD256D193 * a, 2**32)
        a, b = high ^ (key + step * 0x9E3779B9) % 2**32 ^ b, low
    return a, b


ONES, PI = 2**32 - 1, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
PUBLISHED_4X32 = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
PUBLISHED_2X32 = [
    ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
    ((ONES, ONES), ONES, (0xAB302C4D, 0x3DC9D239)),
    (PI[:2], PI[2], (0xBEDBBE6B, 0xE4C770B3)),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED_4X32)
def test_philox_4x32_gives_the_published_words(counter, key, words) -> None:
    got = philox_4x32(tuple(np.uint32(x) for x in counter), tuple(np.uint32(x) for x in key))
    assert [hex(int(word)) for word in got] == [hex(word) for word in words]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED_2X32)
def test_philox_2x32_gives_the_published_words(counter, key, words) -> None:
    got = philox_2x32(tuple(np.uint32(x) for x in counter), np.uint32(key))
    assert [hex(int(word)) for word in got] == [hex(word) for word in words]
    assert in_python(counter, key) == words


def _block(probability: float = 0.3) -> Block:
    """A block whose shards, heads and batch rows are from the middle of a larger call; its keys are strided."""
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
        rule=Rule(1.0, dropout_prob=probability),
    )  # fmt: skip


def test_each_pair_is_kept_by_its_global_indices_alone() -> None:
    block, got = _block(), np.asarray(kept(_block()))
    assert got.shape == (2, 3, 10, 14) and got.dtype == bool
    for b, batch, seed in ((0, 4, 3), (1, 9, 2**32 - 1)):
        for n, head in ((0, 1), (1, 0), (2, 6)):
            key = int(philox_4x32((np.uint32(head), np.uint32(batch), 0, 0), (np.uint32(seed), 0))[0])
            for t, i in enumerate(np.asarray(block.q_index[0]).tolist()):
                for s, j in enumerate(np.asarray(block.kv_index[0]).tolist()):
                    words = in_python((i // 16 * 8 + i % 8, j // 16 * 8 + j % 8), key)
                    half = [half for word in words for half in (word % 2**16, word // 2**16)]
                    least = int(0.3 * 2**16)
                    assert got[b, n, t, s] == (half[2 * (i // 8 % 2) + j // 8 % 2] >= least), (batch, head, i, j)


def test_a_tile_keeps_the_same_entries_as_the_whole_block() -> None:
    whole, tile = np.asarray(kept(_block())), _block().tile(3, 5, 2, 7)
    np.testing.assert_array_equal(np.asarray(kept(tile)), whole[:, :, 3:8, 2:9])


@pytest.mark.parametrize("probability", [2**-16, 0.1, 0.5, 0.99999])
def test_a_probability_counts_in_steps_of_2_to_the_minus_16(probability: float) -> None:
    assert threshold(probability) == int(np.floor(probability * 2**16)) < 2**16
    assert Rule(1.0, dropout_prob=probability).dropout_prob == threshold(probability) / 2**16


@pytest.mark.parametrize("heads", [1, 2])
def test_xla_simplifies_the_key_that_all_rows_of_a_vmap_share(heads: int, capfd: pytest.CaptureFixture[str]) -> None:
    def keys_of(seed: jax.Array) -> jax.Array:
        rows, index = jnp.broadcast_to(seed, (2,)), jnp.zeros(2, jnp.int32)
        block = dataclasses.replace(_block(), head_index=jnp.arange(heads), batch_index=index, seed=rows)
        return keys(block)

    jax.jit(keys_of).lower(jnp.uint32(7)).compile()
    jax.jit(lambda: keys_of(jnp.uint32(7))).lower().compile()
    assert "circular" not in capfd.readouterr().err
