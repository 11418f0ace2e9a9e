# SPDX-License-Identifier: Apache-2.0
"""Rows whose every score is hugely negative, because a finite bias masks the whole row, are as exact as any other."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.protocol import Block
from ringattn_tpu.block import KERNEL
from tpu_blocks import make_block

LENGTH, KEYS, HEADS = 128, 1024, 2
MASKED = slice(8, 40)
"""The rows that the bias covers; the last key of every other row has it too."""


def masking(value: float, covered: bool = True) -> np.ndarray:
    bias = np.random.default_rng(4).normal(size=(1, HEADS, LENGTH, KEYS)).astype(np.float32)
    bias[..., -1] = value
    if covered:
        bias[:, :, MASKED] = value
    return bias


def cut(block: Block, count: int) -> list[Block]:
    """The block against each of so many equal shares of its keys."""
    size = KEYS // count
    return [
        block.map_keys(lambda x, axis, n=n: jax.lax.slice_in_dim(x, n * size, (n + 1) * size, axis=axis))
        for n in range(count)
    ]


def results(block: Block, count: int, dout: jax.Array) -> tuple[Any, dict[str, np.ndarray]]:
    """The partial result and the gradients, as a ring of `count` ranks computes them on one rank."""
    partial, dq = None, None
    for part in cut(block, count):
        partial = KERNEL.forward(part, partial)
    assert partial is not None
    delta = jnp.swapaxes((dout * partial.out).sum(-1), 1, 2)
    found = []
    for part in cut(dataclasses.replace(block, shift=partial.shift), count):
        found.append(KERNEL.backward(part, dout, partial.lse, delta, dq))
        dq = found[-1].dq
    joined = {"dk": 1, "dv": 1, "dbias": 3}
    return partial, {"dq": dq} | {n: np.concatenate([getattr(x, n) for x in found], a) for n, a in joined.items()}


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("value", [-1e6, -1e7, -1e9, float(np.finfo(np.float32).min)])
def test_rows_of_a_huge_negative_bias_are_those_of_jax(value: float, count: int) -> None:
    block = make_block(1, LENGTH, KEYS, HEADS, bias=masking(value))
    dout = jnp.asarray(np.random.default_rng(5).normal(size=block.q.shape), jnp.float32)
    assert block.bias is not None
    want, pullback = jax.vjp(
        lambda q, k, v, bias: jax.nn.dot_product_attention(q, k, v, bias=bias), block.q, block.k, block.v, block.bias
    )
    partial, found = results(block, count, dout)
    np.testing.assert_allclose(partial.out, want, atol=2e-5)
    for (name, got), gradient in zip([(n, found[n]) for n in ("dq", "dk", "dv", "dbias")], pullback(dout), strict=True):
        tolerance = 5e-5 * max(0.1, float(jnp.abs(gradient).max()))
        np.testing.assert_allclose(got, gradient, atol=tolerance, err_msg=name)
    live, _ = results(dataclasses.replace(block, bias=jnp.asarray(masking(value, covered=False))), count, dout)
    rest = np.r_[0 : MASKED.start, MASKED.stop : LENGTH]
    np.testing.assert_array_equal(partial.out[:, rest], live.out[:, rest])
    np.testing.assert_array_equal(partial.lse[:, :, rest], live.lse[:, :, rest])
