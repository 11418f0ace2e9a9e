# SPDX-License-Identifier: Apache-2.0
"""Promises on dropout: every kernel keeps what core keeps, wherever its tokens are, and stores no bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_reports import launches
from given_blocks import KEY_INDICES, QUERIES_FROM, bias, make_block, near
from ringattn_core.contract.dropout import LEVELS, kept, threshold
from ringattn_triton.block_kernel import KERNEL
from test_backward import backward, given_to

SEEDS: dict[str, Any] = {
    "dropout_prob": 0.4,
    "seed": np.array([7, 2**31 + 5], np.uint32),
    "head_index": np.array([3, 2**30], np.int32),
}
PLACES = pytest.mark.parametrize(
    ("indices", "first"),
    [*((indices, QUERIES_FROM[0]) for indices in KEY_INDICES), ("from a multiple of 16", QUERIES_FROM[1])],
)
WEIGHT = 1 / (1 - threshold(0.4) / LEVELS)


@PLACES
def test_the_output_keeps_what_core_keeps(indices: str, first: int) -> None:
    """Equal scores and the unit matrix for values: the output is the draws."""
    kv_length = 40
    kv_index = KEY_INDICES[indices][None, :kv_length].astype(np.int32)
    block = make_block(
        2, 24, kv_length, value_dim=kv_length + 1, softmax_scale=0.0, kv_index=kv_index, tiles=(16, 32), **SEEDS
    )
    unit = jnp.broadcast_to(jnp.eye(kv_length, kv_length + 1)[:, None], (2, kv_length, 2, kv_length + 1))
    block = dataclasses.replace(block, kv=block.kv.at[..., 8:].set(unit), q_index=block.q_index + first)
    got = np.asarray(KERNEL.forward(block, None).out)[..., :kv_length].transpose(0, 2, 1, 3)
    near("out", got, np.where(kept(block), WEIGHT / kv_length, 0), 1e-6)


@PLACES
def test_every_gradient_keeps_what_core_keeps(indices: str, first: int) -> None:
    """Equal scores, and unit matrices for keys and cotangents: dq, dv and the gradient of the bias are the draws."""
    block = make_block(
        2, 24, 40, dim=40, value_dim=24, tiles=(16, 32), bias=bias(2, 2, 24, 40), softmax_scale=1.0,
        kv_index=KEY_INDICES[indices][None].astype(np.int32), **SEEDS,
    )  # fmt: skip
    unit = jnp.broadcast_to(jnp.eye(40)[:, None], (2, 40, 2, 40))
    kv = jnp.concatenate([unit, jnp.ones((2, 40, 2, 24))], -1)
    block = dataclasses.replace(
        block, kv=kv, q=block.q * 0, bias=jnp.zeros_like(block.bias), q_index=block.q_index + first
    )
    dout = jnp.broadcast_to(jnp.eye(24)[:, None], (2, 24, 2, 24))
    lse, delta = jnp.full((2, 2, 24), np.log(40).astype(np.float32)), jnp.zeros((2, 2, 24))
    got = backward(KERNEL, block, dout, lse, delta, jnp.zeros((2, 24, 2, 40)))
    want = np.where(kept(block), WEIGHT / 40, 0)
    near("dq", got["dq"].transpose(0, 2, 1, 3), want, 1e-6)
    near("dv", got["dv"].transpose(0, 2, 3, 1), want, 1e-6)
    near("dbias", got["dbias"], want, 1e-6)
    assert 0.5 < (want > 0).mean() < 0.7


def test_nothing_of_the_size_of_the_scores_is_stored() -> None:
    block = make_block(1, 512, 512, 1, 1, 16, dropout_prob=0.1, seed=np.array([7], np.uint32))

    def both(block: Any, *given: Any) -> Any:
        return KERNEL.forward(block, None), KERNEL.backward(block, *given)

    found = launches(jax.make_jaxpr(both)(block, *given_to(block)).jaxpr)
    assert max(output.size for call, _ in found for output in call.outputs) < 512 * 512 / 4
