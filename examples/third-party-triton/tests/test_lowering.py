# SPDX-License-Identifier: Apache-2.0
"""A ring of this backend lowers for a Hopper GPU, on a machine without one."""

import functools
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import pytest
from ringattn_example_triton import kernel  # pyright: ignore[reportMissingImports]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_three_kernels_lower(dtype, causal: bool, monkeypatch: pytest.MonkeyPatch):
    at = functools.partial(jax_triton.triton_call, compute_capability=90)
    monkeypatch.setattr(jax_triton, "triton_call", at)
    static = {"scale": 0.125, "causal": causal}
    q, k, v = (jax.ShapeDtypeStruct((1, 96, heads, size), dtype) for heads, size in ((4, 64), (2, 64), (2, 32)))

    def both(q, k, v):
        out, lse = kernel.forward(q, k, v, **static)
        return kernel.backward(q, k, v, out, lse, out, **static, delta=lse)

    text = jax.jit(both).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @triton_kernel_call") == 3
