# SPDX-License-Identifier: Apache-2.0
"""Promises on how an output is kept for the backward pass: in two parts, and not once more in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention, rounding


@pytest.mark.parametrize("jitted", [False, True])
def test_both_parts_together_are_as_exact_as_sixteen_bits(jitted: bool):
    """XLA may take a conversion there and back for none, and then there would be no rest."""

    def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x.astype(jnp.bfloat16), rounding.rest(x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=4096) * 10.0 ** np.arange(-8, 8).repeat(256), jnp.float32)
    out, rest = (jax.jit(parts) if jitted else parts)(x)
    assert out.dtype == rest.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounding.whole(out, rest), x, rtol=2**-17)
    assert np.abs(rounding.whole(out, None) / x - 1).max() > 2**-9.1


def test_what_bfloat16_can_hold_has_no_rest():
    x = jnp.asarray([0.0, 1.0, -3.5, 2.0**100, 2.0**-100])
    assert not rounding.rest(x).any()
    assert np.isnan(rounding.rest(jnp.asarray([np.nan]))).all()


@pytest.mark.parametrize("ring", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_backward_pass_keeps_bfloat16_in_two_parts_the_caller_has_one_of_them(dtype: Any, ring: int):
    mesh = jax.make_mesh((ring,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    q = jnp.linspace(-1, 1, 2 * 16 * 3 * 8).reshape(2, 16, 3, 8).astype(dtype)
    value = jnp.linspace(1, 2, 2 * 16 * 5).reshape(2, 16, 1, 5).astype(dtype)

    def call(q: jax.Array, v: jax.Array) -> jax.Array:
        return ring_attention(q, q[:, :, :1], v, causal=True, mesh=mesh, axis_name="sp")

    out, pullback = jax.vjp(call, q, value)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size == out.size]
    assert sorted(leaf.dtype.name for leaf in kept) == {
        jnp.float32: ["float32"], jnp.float16: ["float32"], jnp.bfloat16: ["bfloat16", "bfloat16"],
    }[dtype]  # fmt: skip
    if dtype == jnp.bfloat16:
        assert any(leaf.shape == out.shape and (leaf == out).all() for leaf in kept)
