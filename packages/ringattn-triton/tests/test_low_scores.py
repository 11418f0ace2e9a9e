# SPDX-License-Identifier: Apache-2.0
"""Promises on rows whose every score is hugely negative: outputs and gradients are right, down to finfo.min."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from given_blocks import bias, make_block, near
from ringattn_core.contract.protocol import SHIFT_BELOW, Block
from ringattn_triton.block_kernel import KERNEL, _forward
from ringattn_triton.hopper import family
from ringattn_triton.launch.target import Target

LEAST = float(np.finfo(np.float32).min)
LEVELS = (-1e6, -1e7, -1e9, LEAST)
ROWS = {"every third": np.s_[..., ::3, :], "all": np.s_[..., :, :], "one key lives": np.s_[..., 1:]}


def with_low_rows(level: float, rows: Any, **fields: Any) -> Block:
    given: dict[str, Any] = {"dim": 16, "kv_heads": 1, "tiles": (16, 16), **fields}
    added = bias(2, 2, given.get("q_length", 40), given.get("kv_length", 48)) * np.float32(abs(level) < 1e30)
    added[rows] = level
    sizes = 2, given.pop("q_length", 40), given.pop("kv_length", 48), 2
    return make_block(*sizes, bias=jnp.asarray(added, given.get("dtype", jnp.float32)), **given)


def scores(block: Block) -> tuple[jax.Array, jax.Array]:
    """Scores rounded to float32, as `jax.nn.dot_product_attention` rounds them, and the values of each head."""
    k, v = (jnp.repeat(x.astype(jnp.float32), block.group, 2) for x in (block.k, block.v))
    s = jnp.einsum("btnh,bsnh->bnts", block.q.astype(jnp.float32), k, precision="highest") * block.rule.softmax_scale
    assert block.bias is not None
    return s + block.bias.astype(jnp.float32), v


def reference(block: Block) -> np.ndarray:
    s, v = scores(block)
    return np.asarray(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, -1), v, precision="highest"))


def check(block: Block, tolerance: float = 2e-5) -> Any:
    got = KERNEL.forward(block, None)
    near("out", got.out, reference(block), tolerance)
    return got


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_output_is_that_of_scores_in_float32(level: float, rows: str) -> None:
    block = with_low_rows(level, ROWS[rows])
    got, top = check(block), np.asarray(scores(block)[0]).max(-1)
    np.testing.assert_array_equal(np.asarray(got.shift) != 0, top < SHIFT_BELOW)
    assert np.abs(got.lse).max() < 32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_keys_that_come_in_parts_give_the_same(level: float, dtype: Any) -> None:
    block = with_low_rows(level, ROWS["every third"], dtype=dtype)
    whole, partial = KERNEL.forward(block, None), None
    for start in (32, 16, 0):
        partial = KERNEL.forward(block.tile(0, 40, start, 16), partial)
    assert partial is not None
    near("out", partial.out, whole.out, 2e-5 if dtype == jnp.float32 else 2e-2)
    np.testing.assert_allclose(partial.shift, whole.shift, rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_gradients_are_those_of_scores_in_float32(level: float, rows: str) -> None:
    block = with_low_rows(level, ROWS[rows])
    found = KERNEL.forward(block, None)
    dout = jnp.asarray(np.random.default_rng(8).normal(size=found.out.shape), jnp.float32)
    delta = jnp.swapaxes((dout * found.out).sum(-1), 1, 2)
    got = KERNEL.backward(dataclasses.replace(block, shift=found.shift), dout, found.lse, delta, None)

    def attended(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        s, values = scores(dataclasses.replace(block, q=q, kv=(k, v), bias=bias))
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, -1), values, precision="highest")

    _, transposed = jax.vjp(attended, block.q, block.k, block.v, block.bias)
    for name, want in zip(("dq", "dk", "dv", "dbias"), transposed(dout), strict=True):
        near(name, getattr(got, name), want, 5e-5 * max(1.0, float(jnp.abs(want).max())))


@pytest.mark.parametrize("level", [-1e9, float(jnp.finfo(jnp.bfloat16).min)])
def test_the_kernel_for_hopper_gives_the_same_whole_and_in_parts(level: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(family, "_too_little", lambda constants: False)
    fields = {"dim": 128, "dtype": jnp.bfloat16, "q_length": 200, "kv_length": 256, "tiles": None}
    block = with_low_rows(float(jnp.asarray(level, jnp.bfloat16)), ROWS["every third"], **fields)
    target, partial = Target("cuda", 90), None
    assert family.why_not_forward(block, target) is None
    whole = _forward.__wrapped__(block, None, target)
    near("out", whole.out, reference(block), 2e-2)
    for start in (128, 0):
        partial = _forward.__wrapped__(block.tile(0, 200, start, 128), partial, target)
    near("out in parts", partial.out, whole.out, 2e-2)
    np.testing.assert_allclose(partial.shift, whole.shift, rtol=1e-6)
