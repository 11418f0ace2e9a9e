# SPDX-License-Identifier: Apache-2.0
"""Promises on the forward kernel: it agrees with the XLA backend and with float64, whatever it is asked for."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_xla.block
from given_blocks import KEY_INDICES, OPTIONS, TOLERANCE, dense_mask, make_block, mask_in_tiles, near, with_option
from ringattn_core.config import FwdParams
from ringattn_core.contract import rounding
from ringattn_core.contract.dropout import kept
from ringattn_core.contract.merge import empty
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.errors import InputError
from ringattn_triton import operands, schedules
from ringattn_triton.block import KERNEL
from ringattn_triton.forward import forward

NAN = float("nan")


def check(block: Block, case: str, partial: Partial | None = None) -> Partial:
    """The result, if it is that of the XLA backend."""
    partial = empty(block) if partial is None else partial
    got, want = KERNEL.forward(block, partial), ringattn_xla.block.KERNEL.forward(block, partial)
    near(f"{case}: out", got.out, want.out, TOLERANCE[str(block.q.dtype)])
    near(f"{case}: lse", got.lse, want.lse, TOLERANCE[str(block.q.dtype)])
    return got


@pytest.mark.parametrize("lengths", [(7, 7, None), (41, 53, (16, 16)), (64, 64, (32, 64))], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_right_in_one_tile_in_ragged_tiles_and_in_whole_ones(option: str, lengths: Any) -> None:
    q_length, kv_length, tiles = lengths
    check(with_option(option, q_length, kv_length, tiles=tiles), f"{option} {lengths}")


@pytest.mark.parametrize("option", ["causal", "segments", "dropout", "all at once"])
def test_a_single_query_or_key_is_enough(option: str) -> None:
    for lengths in ((1, 1), (1, 17), (17, 1)):
        check(with_option(option, *lengths), f"{option} {lengths}")


def test_the_output_is_that_of_float64() -> None:
    block = make_block(1, 40, 24, heads=2, kv_heads=1, dim=16, tiles=(16, 16), causal=True, soft_cap=20.0, offset=8)
    q, k, v = (np.asarray(x, np.float64) for x in (block.q, block.k, block.v))
    s = 20 * np.tanh(np.einsum("btnh,bskh->bnts", q, k) * block.rule.scale / 20)
    s = np.where(np.arange(40)[:, None] >= np.arange(24)[None] + 8, s, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(s).sum(-1))
        p = np.nan_to_num(np.exp(s - lse[..., None]))
    got = KERNEL.forward(block, empty(block))
    near("out", got.out, np.einsum("bnts,bskh->btnh", p, v), 1e-6)
    near("lse", got.lse, lse, 2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("option", ["causal", "bias", "soft cap", "dropout", "all at once"])
def test_half_precision_stays_within_its_tolerance(option: str, dtype: Any) -> None:
    check(with_option(option, 48, 40, dim=32, dtype=dtype, tiles=(16, 32)), option)


def test_a_bias_may_have_a_dtype_of_its_own() -> None:
    block = with_option("bias", 24, 24)
    assert block.bias is not None
    check(dataclasses.replace(block, bias=block.bias.astype(jnp.bfloat16)), "bfloat16 bias")


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (8, 24), (33, 5), (1, 1), (64, 128), (200, 256)], ids=str)
def test_any_grouping_of_heads_and_any_head_size(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    dim, value_dim = dims
    block = make_block(
        2, 20, 24, heads=heads[0], kv_heads=heads[1], dim=dim, value_dim=value_dim, causal=True, tiles=(16, 16)
    )
    check(block, f"{heads} {dims}")


def test_keys_and_values_of_one_size_are_read_from_either_packing() -> None:
    block = make_block(2, 20, 24, heads=4, kv_heads=2, causal=True)
    side_by_side = dataclasses.replace(block, kv=jnp.concatenate([block.k, block.v], -1))
    first, second = check(block, "stacked"), check(side_by_side, "side by side")
    np.testing.assert_array_equal(first.out, second.out)


def test_rows_that_see_nothing_are_zero_with_an_lse_of_minus_infinity() -> None:
    block = make_block(1, 40, 40, heads=2, causal=True, offset=20, tiles=(16, 16), dtype=jnp.bfloat16)
    got = check(block, "half of the rows see nothing")
    assert not np.asarray(got.out[:, :20]).any()
    assert np.isneginf(got.lse[..., :20]).all() and np.isfinite(got.lse[..., 20:]).all()
    unseen = dataclasses.replace(block, kv_positions=block.kv_positions + 99)
    got = KERNEL.forward(unseen, empty(unseen))
    assert not np.asarray(got.out).any() and np.isneginf(got.lse).all()


@pytest.mark.parametrize("option", ["causal", "segments", "dense mask", "mask of the algebra", "padding"])
def test_a_key_that_is_nan_reaches_those_who_see_it_and_nobody_else(option: str) -> None:
    block = with_option(option, 40, 40, tiles=(16, 16))
    block = dataclasses.replace(block, kv=block.kv.at[0, :, 31].set(NAN).at[1, :, 31].set(0))
    got, want = (kernel.forward(block, empty(block)) for kernel in (KERNEL, ringattn_xla.block.KERNEL))
    np.testing.assert_array_equal(np.isnan(got.lse), np.isnan(want.lse))
    np.testing.assert_array_equal(np.isnan(got.out), np.isnan(want.out))
    assert not np.isnan(got.lse).all()


@pytest.mark.parametrize("option", ["causal", "window", "segments", "bias that forbids", "all at once"])
def test_the_keys_may_come_in_parts(option: str) -> None:
    block = with_option(option, 41, 48, tiles=(16, 16))
    whole, partial = check(block, option), empty(block)
    for start in (32, 0):
        size = 48 - start if start else 32
        partial = KERNEL.forward(block.tile(0, 41, start, size), partial)
    near("out", partial.out, whole.out, TOLERANCE["float32"])
    near("lse", partial.lse, whole.lse, TOLERANCE["float32"])


def test_what_keys_that_nobody_sees_continue_stays_as_it_was() -> None:
    block = make_block(2, 40, 24, heads=2, causal=True, tiles=(16, 16))
    before = KERNEL.forward(block, empty(block))
    after = KERNEL.forward(dataclasses.replace(block, kv_positions=block.kv_positions + 99), before)
    np.testing.assert_array_equal(after.out, before.out)
    np.testing.assert_allclose(after.lse, before.lse, rtol=3e-7)


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("option", ["window", "segments", "all at once", "bias that forbids", "bias of heads"])
def test_a_query_that_is_no_number_gets_nan_if_it_sees_anything_and_nobody_else_does(option: str, value: float) -> None:
    block = with_option(option, 41, 53, tiles=(16, 16))
    clean, bad = check(block, option), [3, 20, 40]
    q = block.q.at[:, jnp.asarray(bad), 1, 2].set(value)
    got = KERNEL.forward(dataclasses.replace(block, q=q), empty(block))
    lost = np.zeros(clean.lse.shape, bool)
    lost[:, 1, bad] = ~np.isneginf(clean.lse[:, 1, bad])
    assert lost.any()
    np.testing.assert_array_equal(got.lse, np.where(lost, NAN, clean.lse))
    np.testing.assert_array_equal(got.out, np.where(np.swapaxes(lost, 1, 2)[..., None], NAN, clean.out))


def test_a_final_output_has_the_dtype_that_is_asked_for() -> None:
    block = make_block(1, 24, 24, dtype=jnp.bfloat16, causal=True)
    final, kept_on = (KERNEL.forward(block, empty(block, dtype)) for dtype in (jnp.bfloat16, jnp.float32))
    assert final.out.dtype == jnp.bfloat16 and final.lse.dtype == kept_on.out.dtype == jnp.float32
    np.testing.assert_array_equal(final.out, kept_on.out.astype(jnp.bfloat16))
    np.testing.assert_array_equal(final.lse, kept_on.lse)


@pytest.mark.parametrize("lengths", [(24, 24), (41, 53)], ids=str)
def test_what_rounding_took_from_a_final_output_is_there_too(lengths: tuple[int, int]) -> None:
    block = make_block(2, *lengths, dtype=jnp.bfloat16, causal=True, tiles=(16, 16))
    got, exact = KERNEL.forward(block, empty(block, jnp.bfloat16, rest=True)), KERNEL.forward(block, empty(block))
    assert got.rest is not None and exact.rest is None
    np.testing.assert_array_equal(got.out, exact.out.astype(jnp.bfloat16))
    np.testing.assert_allclose(rounding.whole(got.out, got.rest), exact.out, rtol=2**-16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_queries_that_are_held_in_registers_give_the_same_bits(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(1, 37, 29, dim=24, dtype=dtype, causal=True, tiles=(16, 16))
    q = block.q.at[0, 30, 0, 1].set(NAN).at[0, 31].multiply(1e-5)
    given = dataclasses.replace(block, q=q), empty(block)
    from_memory = KERNEL.forward(*given)
    monkeypatch.setattr(schedules, "_may_hold", lambda *_: True)
    held = forward.__wrapped__(*given, schedules.target())
    np.testing.assert_array_equal(held.out, from_memory.out)
    np.testing.assert_array_equal(held.lse, from_memory.lse)


@pytest.mark.parametrize("tiles", [(16, 16), (16, 32)], ids=str)
def test_whole_tiles_that_lie_here_and_there_are_all_visited(tiles: tuple[int, int]) -> None:
    check(make_block(1, 192, 192, mask=mask_in_tiles(192, 32), tiles=tiles), f"tiles of {tiles}")


@pytest.mark.parametrize("option", ["dropout", "soft cap", "all at once"])
def test_the_instructions_and_tiles_of_hopper_give_the_same_result(option: str) -> None:
    block = with_option(option, 70, 130, dim=24, dtype=jnp.bfloat16)
    got = forward.__wrapped__(block, empty(block), schedules.Target("cuda", 90))
    want = ringattn_xla.block.KERNEL.forward(block, empty(block))
    near(f"{option}: out", got.out, want.out, TOLERANCE["bfloat16"])
    near(f"{option}: lse", got.lse, want.lse, TOLERANCE["bfloat16"])


def test_two_runs_give_the_same_bits() -> None:
    block = with_option("all at once", 40, 40, tiles=(16, 16))
    first, second = (KERNEL.forward(block, empty(block)) for _ in range(2))
    np.testing.assert_array_equal(first.out, second.out)
    np.testing.assert_array_equal(first.lse, second.lse)


def test_scores_of_thousands_overflow_nowhere() -> None:
    block = make_block(1, 24, 40, heads=2, scale=1e4, causal=True, offset=4, tiles=(16, 16))
    got = KERNEL.forward(block, empty(block))
    assert np.isfinite(got.out).all() and np.abs(np.asarray(got.lse[..., 4:])).max() > 1e4
    near("the largest score decides", got.out, ringattn_xla.block.KERNEL.forward(block, empty(block)).out, 1e-2)


@pytest.mark.parametrize("kv_length", [40, 32])
@pytest.mark.parametrize("indices", KEY_INDICES)
def test_dropout_keeps_what_core_keeps_wherever_the_keys_are(indices: str, kv_length: int) -> None:
    """Equal scores and the unit matrix for values: the output is the draws."""
    fields: dict[str, Any] = {
        "dropout": 0.4,
        "seed": np.array([7, 2**31 + 5], np.uint32),
        "head_index": np.array([3, 2**30], np.int32),
    }
    kv_index = KEY_INDICES[indices][None, :kv_length].astype(np.int32)
    block = make_block(
        2, 24, kv_length, value_dim=kv_length + 1, scale=0.0, kv_index=kv_index, tiles=(16, 32), **fields
    )
    unit = jnp.broadcast_to(jnp.eye(kv_length, kv_length + 1)[:, None], (2, kv_length, 2, kv_length + 1))
    block = dataclasses.replace(block, kv=block.kv.at[..., 8:].set(unit), q_index=block.q_index + 12345)
    got = np.asarray(KERNEL.forward(block, empty(block)).out)[..., :kv_length]
    np.testing.assert_array_equal(got.transpose(0, 2, 1, 3) > 0, kept(block))
    near("what is kept weighs more", got[got > 0], np.full((got > 0).sum(), 1 / 0.6 / kv_length), 1e-6)


def test_products_of_float32_are_exact_unless_asked_otherwise() -> None:
    exact = check(make_block(1, 24, 24, dim=32), "exact")
    for precision, least, most in (("default", 1e-5, 1e-2), ("highest", 0.0, 1e-6)):
        got = KERNEL.forward(block := make_block(1, 24, 24, dim=32, precision=precision), empty(block))
        assert least <= np.abs(np.asarray(got.out - exact.out)).max() <= most, precision


def test_heads_beyond_256_are_refused_with_the_way_out() -> None:
    block = make_block(1, 4, 4, dim=257)
    with pytest.raises(InputError, match=r"query: has heads of size 257.*up to 256.*'xla'"):
        KERNEL.forward(block, empty(block))


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
        KERNEL.forward(block, empty(block))


def test_a_schedule_that_does_not_fit_the_device_is_refused_with_its_limit() -> None:
    facts = operands.of(make_block(1, 512, 512, dim=128, dtype=jnp.bfloat16)).facts
    asked = FwdParams(q_blocksize=128, kv_blocksize=128, num_stages=4)
    with pytest.raises(InputError, match=r"needs 262144 bytes of shared memory and the device has 232448.*default is"):
        schedules.forward(facts, 2, asked, schedules.Target("cuda", 90))


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_schedules_of_this_package_fit_their_devices(capability: int, dim: int, dtype: Any) -> None:
    target, itemsize = schedules.Target("cuda", capability), jnp.dtype(dtype).itemsize
    options: tuple[dict[str, Any], ...] = (
        {},
        {"mask": dense_mask(1, 1, 512, 512)},
        {"dropout": 0.1, "seed": np.array([1], np.uint32)},
    )
    for fields in options:
        block = make_block(1, 512, 512, dim=dim, dtype=dtype, **fields)
        facts, rule = operands.of(block).facts, block.rule
        assert schedules.forward(facts, itemsize, rule.fwd_params, target).q_tile <= 128
        assert schedules.backward_keys(facts, itemsize, rule.bwd_params, target).kv_tile <= 128
        assert schedules.backward_queries(facts, itemsize, rule.bwd_params, target).q_tile <= 128
