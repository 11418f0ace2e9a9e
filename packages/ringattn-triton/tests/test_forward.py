# SPDX-License-Identifier: Apache-2.0
"""Promises on the forward kernel that the suite cannot see: every schedule is right, and fits its device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_xla.block
from ringattn_core.config import FwdParams
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.errors import InputError
from ringattn_testing.triton.given_blocks import (
    CHOSEN,
    RANGES,
    TOLERANCE,
    dense_mask,
    ids,
    make_block,
    mask_in_tiles,
    near,
    ranges,
    spreads_nan,
    with_option,
)
from ringattn_triton import kernel_inputs
from ringattn_triton.block_kernel import KERNEL, _forward
from ringattn_triton.launch.target import Target, target
from ringattn_triton.portable import schedules


def check(block: Block, case: str, partial: Partial | None = None) -> Partial:
    """The result, if it is that of the XLA backend."""
    got, want = KERNEL.forward(block, partial), ringattn_xla.block.KERNEL.forward(block, partial)
    near(f"{case}: out", got.out, want.out, TOLERANCE[str(block.q.dtype)])
    near(f"{case}: lse", got.lse, want.lse, TOLERANCE[str(block.q.dtype)])
    return got


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_queries_that_are_held_in_registers_give_the_same_bits(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(1, 37, 29, dim=24, dtype=dtype, causal=True, tiles=(16, 16))
    q = block.q.at[0, 31].multiply(1e-5)
    given = dataclasses.replace(block, q=q), None
    from_memory = KERNEL.forward(*given)
    monkeypatch.setattr(schedules, "_operand_fits_registers", lambda *_: True)
    held = jax.jit(lambda *given: _forward.__wrapped__(*given, target()))(*given)
    np.testing.assert_array_equal(held.out, from_memory.out)
    np.testing.assert_array_equal(held.lse, from_memory.lse)


@pytest.mark.parametrize("tiles", [(16, 16), (16, 32)], ids=str)
def test_whole_tiles_that_lie_here_and_there_are_all_visited(tiles: tuple[int, int]) -> None:
    check(make_block(1, 192, 192, mask=mask_in_tiles(192, 32), tiles=tiles), f"tiles of {tiles}")


def test_nan_of_sinks_reaches_rows_that_see_no_key() -> None:
    spreads_nan(KERNEL.forward, make_block(1, 70, 61, causal=True, offset=40, tiles=(16, 16)))


@pytest.mark.parametrize("option", RANGES)
def test_ranges_of_positions_are_kept_to(option: str) -> None:
    block = with_option(option, 70, 61)
    check(block, "continued", check(block, "alone"))


@pytest.mark.parametrize("option", CHOSEN)
def test_chosen_blocks_are_kept_to(option: str) -> None:
    block = with_option(option, 70, 261)
    check(block, "continued", check(block, "alone"))


@pytest.mark.parametrize("option", ["dropout", "soft cap", "all at once"])
def test_the_instructions_and_tiles_of_hopper_give_the_same_result(option: str) -> None:
    block = with_option(option, 70, 130, dim=24, dtype=jnp.bfloat16)
    got = jax.jit(lambda block: _forward.__wrapped__(block, None, Target("cuda", 90)))(block)
    want = ringattn_xla.block.KERNEL.forward(block, None)
    near(f"{option}: out", got.out, want.out, TOLERANCE["bfloat16"])
    near(f"{option}: lse", got.lse, want.lse, TOLERANCE["bfloat16"])


@pytest.mark.parametrize(
    ("heads", "fields"),
    [
        ((16, 2), {}),
        ((8, 1), {"tiles": (64, 32), "q_segments": ids(2, 75), "kv_segments": ids(2, 75)}),
        ((8, 1), {"logits_soft_cap": 2.0, "dtype": jnp.float16}),
        ((8, 1), {"kv_range": ranges(2, 1, 75)}),
    ],
    ids=str,
)
def test_heads_that_share_a_tile_in_short_windows_give_the_same_result(
    heads: tuple[int, int], fields: dict[str, Any]
) -> None:
    window = {"heads": heads[0], "kv_heads": heads[1], "causal": True, "sliding_window": (20, 0)}
    block = make_block(2, 75, 75, **{"dtype": jnp.bfloat16, **window, **fields})
    assert schedules.forward(block, kernel_inputs.of_block(block).constants, target()).sharing == 8
    check(block, "continued", check(block, "alone"))


def test_heads_that_see_other_ranges_share_no_tile() -> None:
    window = {"heads": 8, "kv_heads": 1, "causal": True, "sliding_window": (20, 0), "kv_range": ranges(2, 8, 75)}
    block = make_block(2, 75, 75, **{"dtype": jnp.bfloat16, **window})
    assert schedules.forward(block, kernel_inputs.of_block(block).constants, target()).sharing == 1
    check(block, "alone")


def test_a_schedule_that_does_not_fit_the_device_is_refused_with_its_limit() -> None:
    asked = FwdParams(q_blocksize=128, kv_blocksize=128, num_stages=4)
    block = make_block(1, 512, 512, dim=128, dtype=jnp.bfloat16, fwd_params=asked)
    with pytest.raises(InputError, match=r"needs 262144 bytes of shared memory and the device has 232448.*default is"):
        schedules.forward(block, kernel_inputs.of_block(block).constants, Target("cuda", 90))


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_schedules_of_this_package_fit_their_devices(capability: int, dim: int, dtype: Any) -> None:
    target = Target("cuda", capability)
    options: tuple[dict[str, Any], ...] = (
        {},
        {"mask": dense_mask(1, 1, 512, 512)},
        {"dropout_prob": 0.1, "seed": np.array([1], np.uint32)},
    )
    for fields in options:
        block = make_block(1, 512, 512, dim=dim, dtype=dtype, **fields)
        facts = kernel_inputs.of_block(block).constants
        assert schedules.forward(block, facts, target).q_tile <= 128
        assert schedules.backward_keys(block, facts, target).kv_tile <= 128
        assert schedules.backward_queries(block, facts, target).q_tile <= 128
