# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4's kernels compile for the GPU that CUTE_DSL_ARCH names, on a machine without one."""

import os
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# CUTLASS's compiler reads its variables when it is imported.
os.environ |= {"CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": tempfile.mkdtemp()}

import fa4_jax.kernels  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import pytest
from ringattn_example_fa4 import kernel  # pyright: ignore[reportMissingImports]

TARGET = os.environ["CUTE_DSL_ARCH"]
PRODUCT = {"sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}[TARGET]


def test_both_passes_compile(monkeypatch: pytest.MonkeyPatch):
    """With a causal mask: without one, kernels for Blackwell ask a driver for the number of multiprocessors."""
    monkeypatch.setattr(fa4_jax.kernels, "_device_arch", lambda: int(TARGET[3:-1]))
    monkeypatch.setattr(kernel, "on_gpus", lambda: True)
    q, k, v = (jax.ShapeDtypeStruct((1, 96, heads, 128), jnp.bfloat16) for heads in (4, 2, 2))

    def both(q, k, v):
        out, lse = kernel.forward(q, k, v, scale=0.125, causal=True)
        return kernel.backward(q, k, v, out, lse, out, scale=0.125, causal=True)

    jax.jit(both).trace(q, k, v).lower(lowering_platforms=("cuda",))
    made = Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob(f"*{TARGET}.ptx")
    with_products = [path for path in made if PRODUCT in path.read_text()]
    assert len(with_products) == 2  # the forward kernel, and that of the gradients
    assert all(path.with_suffix(".cubin").stat().st_size for path in with_products)
