# SPDX-License-Identifier: Apache-2.0
"""Rows whose every score is hugely negative, because a finite bias masks the whole row, are as exact as any other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention, ring_mesh

VALUES = (-1e6, -1e7, -1e9, float(np.finfo(np.float32).min))
LENGTH = 64
MASKED = slice(8, 40)
"""The rows that a bias of such a value covers; the last key of every other row has it too."""


def inputs() -> list[jax.Array]:
    draw = np.random.default_rng(3)
    return [jnp.asarray(draw.normal(size=(1, LENGTH, heads, 16)), jnp.float32) for heads in (4, 2, 2, 4)]


def bias(value: float, covered: bool = True) -> jax.Array:
    found = np.random.default_rng(4).normal(size=(1, 4, LENGTH, LENGTH)).astype(np.float32)
    found[..., -1] = value
    if covered:
        found[:, :, MASKED] = value
    return jnp.asarray(found)


@functools.cache
def gradients(ranks: int | None) -> Any:
    """Output, lse and the gradients of q, k, v and the bias: ours on a ring, or with `None` those of `jax.nn`."""

    def attend(*x: jax.Array) -> tuple[jax.Array, Any]:
        q, k, v, bias = x
        if ranks is None:
            return jax.nn.dot_product_attention(q, k, v, bias=bias), None
        mesh = ring_mesh(jax.devices()[:ranks])
        return ring_attention(q, k, v, None, bias, mesh=mesh, axis_name="sp", backend="xla", return_lse=True)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, dout: jax.Array) -> Any:
        out, pullback, lse = jax.vjp(attend, q, k, v, bias, has_aux=True)
        return out, lse, pullback(dout)

    return jax.jit(both)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("value", VALUES)
def test_rows_of_a_huge_negative_bias_are_those_of_jax(value: float, ranks: int) -> None:
    q, k, v, dout = inputs()
    out, lse, found = gradients(ranks)(q, k, v, bias(value), dout)
    want, _, wanted = gradients(None)(q, k, v, bias(value), dout)
    np.testing.assert_allclose(out, want, atol=2e-5)
    for name, got, gradient in zip(("dq", "dk", "dv", "dbias"), found, wanted, strict=True):
        np.testing.assert_allclose(got, gradient, atol=5e-5 * max(0.1, float(jnp.abs(gradient).max())), err_msg=name)
    live_out, live_lse, _ = gradients(ranks)(q, k, v, bias(value, covered=False), dout)
    rest = np.r_[0 : MASKED.start, MASKED.stop : LENGTH]
    np.testing.assert_array_equal(out[:, rest], live_out[:, rest])
    np.testing.assert_array_equal(lse[:, :, rest], live_lse[:, :, rest])
