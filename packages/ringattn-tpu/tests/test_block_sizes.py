# SPDX-License-Identifier: Apache-2.0
"""Tiles are as long as was asked for, else as the shapes and the scalar memory want; what cannot be is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ringattn_core.contract.protocol import Block
from ringattn_core.errors import InputError
from ringattn_testing.tpu.blocks import make_block
from ringattn_tpu import block_sizes, steps
from ringattn_tpu.block_sizes import Sizes


def shaped(length: int, **options: Any) -> Block:
    """A block with so many queries and keys whose arrays are shapes alone."""
    one = make_block(1, 1, 1, 1, dim=128, dtype=jnp.bfloat16, **options)

    def longer(x: jax.Array, axis: int) -> jax.Array:
        return jnp.repeat(x, length, axis)

    return jax.eval_shape(lambda block: block.map_queries(longer).map_keys(longer), one)


def chosen(block: Block) -> Sizes:
    return block_sizes.choose(block, block.rule.fwd_params)


@pytest.mark.parametrize(("asked", "got"), [(128, 128), (200, 256), (1, 128), (512, 512), (1000, 1024), (2048, 2048)])
def test_sizes_asked_for_are_rounded_up_to_whole_registers(asked: int, got: int):
    sizes = chosen(shaped(8192, params={"q_blocksize": asked, "kv_blocksize": 256}))
    assert (sizes.q_tile, sizes.kv_tile, sizes.q_length, sizes.kv_length) == (got, 256, 8192, 8192)


@pytest.mark.parametrize(
    ("length", "tile", "padded"),
    [(1, 128, 128), (128, 128, 128), (129, 256, 256), (1024, 1024, 1024), (1025, 640, 1280), (2000, 1024, 2048),
     (2100, 768, 2304), (8192, 1024, 8192)],
)  # fmt: skip
def test_tiles_are_near_equal_and_padding_is_less_than_a_register_a_tile(length: int, tile: int, padded: int):
    sizes = chosen(shaped(length))
    assert (sizes.q_tile, sizes.q_length) == (tile, padded)
    assert padded % tile == 0 and padded - length < 128 * (padded // tile)


def test_tiles_grow_with_the_shard_until_the_list_of_steps_fits():
    sizes = chosen(shaped(2**20))
    assert (sizes.q_tile, sizes.kv_tile) == (4096, 4096)
    assert steps.fits(1, 2**20 // 4096, 2**20 // 4096) and not steps.fits(1, 2**20 // 2048, 2**20 // 2048)


@pytest.mark.parametrize(
    ("asked", "tile", "part"), [(None, 1024, 512), (256, 1024, 256), (600, 1280, 640), (512, 768, 384)]
)
def test_a_part_is_the_longest_that_divides_its_tile(asked: int | None, tile: int, part: int):
    params = {"extra": {"part": asked}} if asked else {}
    assert chosen(shaped(8192, params=params)).part_of(tile, default=512) == part


@pytest.mark.parametrize("part", [0, -128, 2.5, "all"])
def test_a_part_that_is_no_number_of_tokens_is_refused(part: Any):
    with pytest.raises(InputError, match=r'extra=\{"part": .*got .*number of tokens'):
        chosen(shaped(256, params={"extra": {"part": part}}))
