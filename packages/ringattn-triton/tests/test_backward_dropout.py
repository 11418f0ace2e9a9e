# SPDX-License-Identifier: Apache-2.0
"""Promises on dropout in the backward kernels: it keeps what core keeps, drawn once where bits of it may be kept."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_triton.backward
import ringattn_xla.block
from compile_reports import launches
from given_blocks import KEY_INDICES, bias, make_block, near, with_option
from ringattn_core.config import BwdParams
from ringattn_core.contract.dropout import kept
from ringattn_core.contract.protocol import Block
from ringattn_triton import schedules
from ringattn_triton.block import KERNEL
from ringattn_triton.schedules import Target
from test_backward import TOLERANCE, backward, check, compare, given_to


def bits_of(block: Block, *given: Any) -> list[tuple[int, ...]]:
    """The shapes of the bits that are kept of what survives dropout, if any are."""
    found = launches(jax.make_jaxpr(KERNEL.backward)(block, *given).jaxpr)
    outputs = [output for call, _ in found for output in call.outputs if call.name == "ringattn_backward_queries"]
    return [output.shape for output in outputs if output.dtype == jnp.uint8 and output.size > 1]


@pytest.mark.parametrize("target", [None, Target("cuda", 90)], ids=str)
@pytest.mark.parametrize(("option", "kv_tile"), [("dropout", 32), ("dropout", 64), ("dropout", 16), ("every", 32)])
def test_to_draw_what_survives_dropout_again_gives_the_same_bits(
    option: str, kv_tile: int, target: Target | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"kv_index": np.arange(130)[None] * 4 + 1} if option == "every" else {}
    block = with_option("dropout", 70, 130, dim=24, dtype=jnp.bfloat16, tiles=(32, kv_tile), **fields)
    given = given_to(block)
    if target is not None:
        monkeypatch.setattr(schedules, "target", lambda: target)
    assert len(bits_of(block, *given)) == (kv_tile >= 32)
    read = backward(KERNEL, block, *given)
    monkeypatch.setattr(ringattn_triton.backward, "MOST_BITS", 0)
    jax.clear_caches()
    assert not bits_of(block, *given)
    drawn = backward(KERNEL, block, *given)
    compare(option, drawn, backward(ringattn_xla.block.KERNEL, block, *given), TOLERANCE["bfloat16"])
    for name, x in drawn.items():
        np.testing.assert_array_equal(read[name], x, name)


LONGER = [  # (target, dtype, lengths, head size): the default tiles of dk and dv are longer than those of dq
    (Target("cuda", 90), jnp.bfloat16, (16, 192), 128),
    (Target("cuda", 80), jnp.bfloat16, (16, 96), 32),
    (Target("cuda", 90), jnp.float32, (96, 64), 64),
]


@pytest.mark.parametrize(("target", "dtype", "lengths", "dim"), LONGER, ids=str)
def test_the_bits_are_as_long_as_the_tiles_of_both_kernels(
    target: Target, dtype: Any, lengths: tuple[int, int], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "target", lambda: target)
    block = make_block(1, *lengths, 1, 1, dim, dtype=dtype, dropout=0.1, seed=np.array([7], np.uint32))
    assert bits_of(block, *given_to(block))
    check(block, f"{target}, {lengths}")


@pytest.mark.parametrize(("tile", "kept"), [(64, True), (16, False)])
def test_the_bits_are_as_long_as_tiles_that_the_caller_fixes_or_not_kept(tile: int, kept: bool) -> None:
    params = BwdParams(kv_blocksize=tile, q_blocksize=64, extra={"dq_kv_blocksize": 32, "dq_q_blocksize": 16})
    block = make_block(1, 70, 96, 1, 1, 16, dropout=0.1, seed=np.array([7], np.uint32), bwd_params=params)
    assert bool(bits_of(block, *given_to(block))) == kept
    check(block, f"tiles of {tile}")


@pytest.mark.parametrize("added", [False, True], ids=["", "with a bias"])
@pytest.mark.parametrize("indices", KEY_INDICES)
def test_dropout_keeps_what_core_keeps_in_every_gradient(indices: str, added: bool) -> None:
    """Equal scores, and unit matrices for keys and cotangents: dq, dv and the gradient of the bias are the draws."""
    block = make_block(
        2, 24, 40, dim=40, value_dim=24, tiles=(16, 32), bias=bias(2, 2, 24, 40), dropout=0.4,
        seed=np.array([7, 2**31 + 5], np.uint32), head_index=np.array([3, 2**30], np.int32),
        kv_index=KEY_INDICES[indices][None].astype(np.int32), scale=1.0,
    )  # fmt: skip
    unit = jnp.broadcast_to(jnp.eye(40)[:, None], (2, 40, 2, 40))
    kv = jnp.concatenate([unit, jnp.ones((2, 40, 2, 24))], -1)
    block = dataclasses.replace(
        block, kv=kv, q=block.q * 0, bias=jnp.zeros_like(block.bias) if added else None, q_index=block.q_index + 12345
    )
    dout = jnp.broadcast_to(jnp.eye(24)[:, None], (2, 24, 2, 24))
    lse, delta = jnp.full((2, 2, 24), np.log(40).astype(np.float32)), jnp.zeros((2, 2, 24))
    got = backward(KERNEL, block, dout, lse, delta, jnp.zeros((2, 24, 2, 40)))
    want = np.where(kept(block), 1 / 0.6 / 40, 0)
    near("dq", got["dq"].transpose(0, 2, 1, 3), want, 1e-6)
    near("dv", got["dv"].transpose(0, 2, 3, 1), want, 1e-6)
    assert ("dbias" in got) == added
    if added:
        near("dbias", got["dbias"], want, 1e-6)
    assert 0.5 < (want > 0).mean() < 0.7
