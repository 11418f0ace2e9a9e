# SPDX-License-Identifier: Apache-2.0
"""Promises on the forward kernel: it agrees with the XLA backend and with float64, whatever it is asked for."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_xla.block
from given_blocks import OPTIONS, TOLERANCE, dense_mask, make_block, mask_in_tiles, near, with_option
from ringattn_core.config import FwdParams
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.errors import InputError
from ringattn_triton import kernel_inputs
from ringattn_triton.block_kernel import KERNEL, _forward
from ringattn_triton.launch.target import Target, target
from ringattn_triton.portable import schedules

NAN = float("nan")


def check(block: Block, case: str, partial: Partial | None = None) -> Partial:
    """The result, if it is that of the XLA backend."""
    got, want = KERNEL.forward(block, partial), ringattn_xla.block.KERNEL.forward(block, partial)
    near(f"{case}: out", got.out, want.out, TOLERANCE[str(block.q.dtype)])
    near(f"{case}: lse", got.lse, want.lse, TOLERANCE[str(block.q.dtype)])
    return got


@pytest.mark.parametrize("lengths", [(7, 7, None), (41, 53, (16, 16)), (64, 64, (32, 64))], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_right_in_one_tile_in_ragged_tiles_and_in_whole_ones(option: str, lengths: Any) -> None:
    q_length, kv_length, tiles = lengths
    check(with_option(option, q_length, kv_length, tiles=tiles), f"{option} {lengths}")


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (8, 24), (33, 5), (1, 1), (64, 128), (200, 256)], ids=str)
def test_any_grouping_of_heads_and_any_head_size(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    dim, value_dim = dims
    block = make_block(
        2, 20, 24, heads=heads[0], kv_heads=heads[1], dim=dim, value_dim=value_dim, causal=True, tiles=(16, 16)
    )
    check(block, f"{heads} {dims}")


def test_keys_and_values_are_read_from_either_packing_and_where_they_are() -> None:
    block = make_block(2, 20, 24, heads=4, kv_heads=2, causal=True)
    stacked = check(block, "stacked")
    for kv in (jnp.concatenate([block.k, block.v], -1), (block.k, block.v)):
        np.testing.assert_array_equal(check(dataclasses.replace(block, kv=kv), "packed").out, stacked.out)


def test_a_final_output_has_the_dtype_of_the_queries() -> None:
    block = make_block(1, 24, 24, dtype=jnp.bfloat16, causal=True)
    pair = dataclasses.replace(block, kv=(block.k, block.v), final=True)
    final, kept_on = KERNEL.forward(pair, None), KERNEL.forward(block, None)
    assert final.out.dtype == jnp.bfloat16 and final.lse.dtype == kept_on.out.dtype == jnp.float32
    np.testing.assert_array_equal(final.out, kept_on.out.astype(jnp.bfloat16))
    np.testing.assert_array_equal(final.lse, kept_on.lse)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_queries_that_are_held_in_registers_give_the_same_bits(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(1, 37, 29, dim=24, dtype=dtype, causal=True, tiles=(16, 16))
    q = block.q.at[0, 31].multiply(1e-5)
    given = dataclasses.replace(block, q=q), None
    from_memory = KERNEL.forward(*given)
    monkeypatch.setattr(schedules, "_operand_fits_registers", lambda *_: True)
    held = _forward.__wrapped__(*given, target())
    np.testing.assert_array_equal(held.out, from_memory.out)
    np.testing.assert_array_equal(held.lse, from_memory.lse)


@pytest.mark.parametrize("tiles", [(16, 16), (16, 32)], ids=str)
def test_whole_tiles_that_lie_here_and_there_are_all_visited(tiles: tuple[int, int]) -> None:
    check(make_block(1, 192, 192, mask=mask_in_tiles(192, 32), tiles=tiles), f"tiles of {tiles}")


@pytest.mark.parametrize("option", ["dropout", "soft cap", "all at once"])
def test_the_instructions_and_tiles_of_hopper_give_the_same_result(option: str) -> None:
    block = with_option(option, 70, 130, dim=24, dtype=jnp.bfloat16)
    got = _forward.__wrapped__(block, None, Target("cuda", 90))
    want = ringattn_xla.block.KERNEL.forward(block, None)
    near(f"{option}: out", got.out, want.out, TOLERANCE["bfloat16"])
    near(f"{option}: lse", got.lse, want.lse, TOLERANCE["bfloat16"])


def test_two_runs_give_the_same_bits() -> None:
    block = with_option("all at once", 40, 40, tiles=(16, 16))
    first, second = (KERNEL.forward(block, None) for _ in range(2))
    np.testing.assert_array_equal(first.out, second.out)
    np.testing.assert_array_equal(first.lse, second.lse)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"q_blocksize": 48}, r"fwd_params.q_blocksize: got 48.*power of two from 16 to 256"),
        ({"kv_blocksize": 8}, r"fwd_params.kv_blocksize: got 8.*power of two from 16 to 256"),
        ({"num_warps": 3}, r"fwd_params.num_warps: got 3.*power of two from 1 to 16"),
        ({"num_stages": 9}, r"fwd_params.num_stages: got 9.*from 1 to 8"),
    ],
)
def test_a_schedule_that_no_kernel_has_is_refused(params: dict[str, Any], said: str) -> None:
    block = make_block(1, 4, 4, fwd_params=FwdParams(**params))
    with pytest.raises(InputError, match=said):
        KERNEL.forward(block, None)


def test_a_schedule_that_does_not_fit_the_device_is_refused_with_its_limit() -> None:
    facts = kernel_inputs.of_block(make_block(1, 512, 512, dim=128, dtype=jnp.bfloat16)).constants
    asked = FwdParams(q_blocksize=128, kv_blocksize=128, num_stages=4)
    with pytest.raises(InputError, match=r"needs 262144 bytes of shared memory and the device has 232448.*default is"):
        schedules.forward(facts, 2, asked, Target("cuda", 90))


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_schedules_of_this_package_fit_their_devices(capability: int, dim: int, dtype: Any) -> None:
    target, itemsize = Target("cuda", capability), jnp.dtype(dtype).itemsize
    options: tuple[dict[str, Any], ...] = (
        {},
        {"mask": dense_mask(1, 1, 512, 512)},
        {"dropout": 0.1, "seed": np.array([1], np.uint32)},
    )
    for fields in options:
        block = make_block(1, 512, 512, dim=dim, dtype=dtype, **fields)
        facts, rule = kernel_inputs.of_block(block).constants, block.rule
        assert schedules.forward(facts, itemsize, rule.fwd_params, target).q_tile <= 128
        assert schedules.backward_keys(facts, itemsize, rule.bwd_params, target).kv_tile <= 128
        assert schedules.backward_queries(facts, itemsize, rule.bwd_params, target).q_tile <= 128
