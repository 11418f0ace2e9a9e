# SPDX-License-Identifier: Apache-2.0
"""Promises of dropout beside its draws, which the conformance suite compares with published ones through its oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.dropout import kept, keys, threshold
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule


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
        q_segments=None, kv_segments=None, bias=None, slopes=None, first=None, last=None, bits=None,
        bits_of_head=None,
        seed=jnp.array([3, 2**32 - 1], jnp.uint32),
        rule=Rule(1.0, dropout_prob=probability),
    )  # fmt: skip


def test_a_tile_keeps_the_same_entries_as_the_whole_block() -> None:
    whole, tile = (np.asarray(jax.jit(kept)(block)) for block in (_block(), _block().tile(3, 5, 2, 7)))
    np.testing.assert_array_equal(tile, whole[:, :, 3:8, 2:9])


@pytest.mark.parametrize("probability", [2**-16, 0.1, 0.5, 0.99999])
def test_a_probability_counts_in_steps_of_2_to_the_minus_16(probability: float) -> None:
    assert threshold(probability) == int(np.floor(probability * 2**16)) < 2**16
    assert Rule(1.0, dropout_prob=probability).dropout_prob == threshold(probability) / 2**16


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("heads", [1, 2])
def test_xla_simplifies_the_key_that_all_rows_of_a_vmap_share(heads: int, capfd: pytest.CaptureFixture[str]) -> None:
    def keys_of(seed: jax.Array) -> jax.Array:
        rows, index = jnp.broadcast_to(seed, (2,)), jnp.zeros(2, jnp.int32)
        block = dataclasses.replace(_block(), head_index=jnp.arange(heads), batch_index=index, seed=rows)
        return keys(block)

    jax.jit(keys_of).lower(jnp.uint32(7)).compile()
    jax.jit(lambda: keys_of(jnp.uint32(7))).lower().compile()
    assert "circular" not in capfd.readouterr().err
