# SPDX-License-Identifier: Apache-2.0
"""Promises on the backward kernels that the suite cannot see: every schedule is right, exact and fits its device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_xla.block
from ringattn_core.config import BwdParams
from ringattn_core.errors import InputError
from ringattn_testing.triton.compile_reports import launches
from ringattn_testing.triton.given_blocks import CHOSEN, RANGES, make_block, mask_in_tiles, near, with_option
from ringattn_testing.triton.gradients import TOLERANCE, backward, check, compare, given_to
from ringattn_triton import block_kernel, kernel_inputs
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.launch.target import Target
from ringattn_triton.portable import schedules
from ringattn_triton.portable.schedules import Schedule


@pytest.mark.parametrize("tiles", [(16, 16), (16, 32)], ids=str)
def test_whole_tiles_that_lie_here_and_there_are_all_visited(tiles: tuple[int, int]) -> None:
    check(make_block(1, 192, 192, mask=mask_in_tiles(192, 32), tiles=tiles), f"tiles of {tiles}")


@pytest.mark.parametrize("option", RANGES)
def test_ranges_of_positions_are_kept_to(option: str) -> None:
    check(with_option(option, 70, 61), option)


@pytest.mark.parametrize("option", CHOSEN)
def test_chosen_blocks_are_kept_to(option: str) -> None:
    check(with_option(option, 70, 261), option)


@pytest.mark.parametrize("option", ["dropout", "soft cap", "all at once"])
def test_the_instructions_and_tiles_of_hopper_give_the_same_gradients(option: str, monkeypatch: Any) -> None:
    block = with_option(option, 70, 130, dim=24, dtype=jnp.bfloat16)
    given = given_to(block)
    monkeypatch.setattr(block_kernel, "target", lambda: Target("cuda", 90))
    got = backward(KERNEL, block, *given)
    compare(option, got, backward(ringattn_xla.block.KERNEL, block, *given), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("option", ["slopes", "all at once"])
def test_the_gradient_of_slopes_in_half_precision_is_as_exact_as_in_float32(
    option: str, capability: int, monkeypatch: Any
) -> None:
    """The rest of its error in a call is that of `delta`, which comes from the rounded output: `docs/numerics.md`."""
    block = with_option(option, 41, 53, dtype=jnp.bfloat16)
    given = given_to(block)
    monkeypatch.setattr(block_kernel, "target", lambda: Target("cuda", capability))
    got = backward(KERNEL, block, *given)["dslopes"]
    wide = dataclasses.replace(block, q=block.q.astype(jnp.float32), kv=block.kv.astype(jnp.float32))
    want = backward(ringattn_xla.block.KERNEL, wide, *given)["dslopes"]
    near("dslopes", got, want, TOLERANCE["float32"] * np.abs(want).max())


@pytest.mark.parametrize(("dtype", "family"), [(jnp.float32, "ringattn_backward_keys"), (jnp.bfloat16, "hopper")])
def test_gradients_of_stacked_keys_are_written_as_one_array(
    dtype: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block(2, 128, 128, heads=4, kv_heads=2, dim=64, causal=True, dtype=dtype, fused_backward=True)
    rows = jnp.zeros((2, 4, 128))
    monkeypatch.setattr(block_kernel, "target", lambda: Target("cuda", 90))
    text = str(jax.make_jaxpr(KERNEL.backward)(block, block.q, rows, rows, None))
    assert family in text and "f32[2,2,128,2,64]" in text
    apart = str(
        jax.make_jaxpr(KERNEL.backward)(dataclasses.replace(block, kv=(block.k, block.v)), block.q, rows, rows, None)
    )
    assert family in apart and "f32[2,2,128,2,64]" not in apart


@pytest.mark.parametrize("option", ["causal", "all at once"])
def test_final_gradients_have_the_dtypes_of_the_inputs_and_others_float32(option: str) -> None:
    block = with_option(option, 24, 40, dtype=jnp.bfloat16)
    block = dataclasses.replace(block, bias=None if block.bias is None else block.bias.astype(jnp.bfloat16))
    dout, lse, delta, dq = given_to(block)
    pair = dataclasses.replace(block, kv=(block.k, block.v), final=True)
    final = KERNEL.backward(pair, dout.astype(block.q.dtype), lse, delta, None)
    begun = backward(KERNEL, block, dout, lse, delta, None)
    for name, want in backward(KERNEL, block, dout, lse, delta, dq * 0).items():
        dtype = jnp.float32 if name == "dslopes" else jnp.bfloat16
        assert getattr(final, name).dtype == dtype and begun[name].dtype == jnp.float32, name
        np.testing.assert_array_equal(begun[name], want, name)
        np.testing.assert_array_equal(getattr(final, name), jnp.asarray(want).astype(dtype), name)


@pytest.mark.parametrize("option", ["documents as ranges", "segments"])
def test_keys_that_are_held_in_registers_give_the_same_bits(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = with_option(option, 40, 52, dim=24, dtype=jnp.bfloat16, tiles=(32, 64))
    block = dataclasses.replace(block, kv=block.kv.at[0, 0, 30].multiply(1e-5))
    given = given_to(block)
    want = backward(KERNEL, block, *given)
    monkeypatch.setattr(schedules, "_keys_fit_registers", lambda *_: True)
    jax.clear_caches()
    for name, x in backward(KERNEL, block, *given).items():
        np.testing.assert_array_equal(x, want[name], name)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"q_blocksize": 48}, r"bwd_params.q_blocksize: got 48.*power of two from 16 to 256"),
        ({"num_warps": 32}, r"bwd_params.num_warps: got 32.*power of two from 1 to 16"),
        ({"num_stages": 9}, r"bwd_params.num_stages: got 9.*from 1 to 8"),
        ({"extra": {"dq_kv_blocksize": 24}}, r"kv_blocksize: got 24.*power of two from 16 to 256"),
    ],
    ids=str,
)
def test_a_schedule_that_no_kernel_has_is_refused(params: dict[str, Any], said: str) -> None:
    block = make_block(1, 4, 4, bwd_params=BwdParams(**params))
    rows = jnp.zeros((1, 2, 4))
    with pytest.raises(InputError, match=said):
        KERNEL.backward(block, block.q, rows, rows, block.q)


@pytest.mark.parametrize("schedule", [schedules.backward_keys, schedules.backward_queries])
def test_a_schedule_that_does_not_fit_the_device_is_refused_with_its_limit(schedule: Any) -> None:
    asked = BwdParams(q_blocksize=128, kv_blocksize=128, num_stages=4)
    block = make_block(1, 512, 512, dim=128, dtype=jnp.bfloat16, bwd_params=asked)
    with pytest.raises(InputError, match=r"needs 262144 bytes of shared memory and the device has 232448.*default is"):
        schedule(block, kernel_inputs.of_block(block).constants, Target("cuda", 90))


def test_the_gradient_of_the_queries_may_have_a_schedule_of_its_own() -> None:
    own = {"dq_q_blocksize": 64, "dq_kv_blocksize": 32, "dq_num_warps": 2, "dq_num_stages": 1}
    params = BwdParams(q_blocksize=16, kv_blocksize=32, num_warps=4, num_stages=3, extra=own)
    block = with_option("all at once", 70, 50, bwd_params=params)
    facts, target = kernel_inputs.of_block(block).constants, Target("cuda", 90)
    assert schedules.backward_keys(block, facts, target) == Schedule(16, 32, 4, 3, in_registers=False)
    assert schedules.backward_queries(block, facts, target) == Schedule(64, 32, 2, 1, in_registers=False)
    check(block, "two schedules")


def test_dropout_stores_nothing_of_the_size_of_the_scores() -> None:
    block = make_block(1, 512, 512, 1, 1, 16, dropout_prob=0.1, seed=np.array([7], np.uint32))

    def both(block: Any, *given: Any) -> Any:
        return KERNEL.forward(block, None), KERNEL.backward(block, *given)

    found = launches(jax.make_jaxpr(both)(block, *given_to(block)).jaxpr)
    assert max(output.size for call, _ in found for output in call.outputs) < 512 * 512 / 4
