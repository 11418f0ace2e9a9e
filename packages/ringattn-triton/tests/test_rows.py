# SPDX-License-Identifier: Apache-2.0
"""Promises on the rows of the backward pass: the kernel gives what core gives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_reports import launches
from ringattn_core import finite, ring_attention, rounding
from ringattn_triton.rows import ELEMENTS, rows

NAN, INFINITY = float("nan"), float("inf")


def given(dtype: Any, head_dim: int = 40, value_dim: int = 24, length: int = 37) -> list[Any]:
    """Rows of more than one program, some of which see nothing, with what is no number in each array."""
    draw = np.random.default_rng(0)
    shapes = [(2, length, 3, head_dim), (2, length, 3, value_dim), (2, length, 3, value_dim)]
    q, dout, out = (jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes)
    lse, dlse = (jnp.asarray(draw.normal(size=(2, 3, length)), jnp.float32) for _ in range(2))
    seen = jnp.asarray(draw.random((2, 3, length)) < 0.8).at[:, :, :9].set(True).at[:, :, 9:11].set(False)
    q = q.at[0, 1, 0, 3].set(NAN).at[1, 2, 1].set(INFINITY)
    dout = dout.at[0, 3, 2, 1].set(NAN).at[1, 4, 0, 5].set(-INFINITY).at[1, 9, 1].set(NAN)
    out = out.at[1, 5, 2, 7].set(INFINITY).at[0, 10, 0].set(0)
    lse = lse.at[0, 1, 6].set(NAN).at[:, :, 9:11].set(-INFINITY)
    assert q[..., 0].size > ELEMENTS // 64
    return [q, dout, out, None, lse, dlse.at[1, 0, 7].set(INFINITY), seen]


def same(got: finite.Rows, want: finite.Rows) -> None:
    for name in ("q", "dout", "lse"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == theirs.dtype, name
        np.testing.assert_array_equal(mine.astype(jnp.float32), theirs.astype(jnp.float32), name)
    for name in ("delta", "whole"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), 1e-5, 1e-5, err_msg=name)


@pytest.mark.parametrize("dims", [(40, 24), (64, 64), (8, 136)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rows_are_those_of_core(dtype: Any, dims: tuple[int, int]) -> None:
    arrays = given(dtype, *dims)
    got = rows(*arrays)
    same(got, finite.rows(*arrays))
    lost = np.isnan(got.lse)
    assert {(0, 2, 3), (1, 0, 4), (1, 2, 5), (0, 1, 6), (1, 0, 7)} == set(zip(*np.nonzero(lost), strict=True))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (got.q, got.dout, got.delta))


def test_an_output_in_float32_is_not_rounded_nor_is_one_in_two_parts() -> None:
    q, dout, out, rest, *others = given(jnp.bfloat16)
    exact = jnp.asarray(np.random.default_rng(1).normal(size=out.shape), jnp.float32)
    want = finite.rows(q, dout, exact, rest, *others)
    same(rows(q, dout, exact, rest, *others), want)
    in_two = exact.astype(jnp.bfloat16), rounding.rest(exact)
    got = rows(q, dout, *in_two, *others)
    same(got, finite.rows(q, dout, *in_two, *others))
    np.testing.assert_allclose(got.delta, want.delta, 1e-4, 1e-4)


def test_a_backward_pass_has_its_rows_from_the_kernel() -> None:
    gradient = jax.grad(lambda q: ring_attention(q, q, q, backend="triton").sum())
    names = [call.name for call, _ in launches(jax.make_jaxpr(gradient)(jnp.ones((1, 16, 2, 8))).jaxpr)]
    assert names.count("ringattn_rows") == 1


@pytest.mark.parametrize("axes", [(0, 0, 0, None, 0, 0, 0), (0, None, 1, None, None, 0, None)], ids=str)
def test_a_vmapped_axis_has_rows_too(axes: tuple[int | None, ...]) -> None:
    arrays = given(jnp.float32)
    made = [x if axis is None else jnp.stack([x, x], axis) for x, axis in zip(arrays, axes, strict=True)]
    same(jax.vmap(rows, axes)(*made), jax.vmap(finite.rows, axes)(*made))
