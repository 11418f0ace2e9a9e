# SPDX-License-Identifier: Apache-2.0
"""The examples of third-party backends are inert; those for a GPU are correct, and say what is not installed.

`nox -s thirdparty` certifies the two that run on a CPU: their numbers, and that they refuse what they lack.
"""

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import Backend, Feature, ring_attention
from ringattn_core.backends.discovery import registered
from ringattn_core.errors import BackendUnavailableError

EXAMPLES = Path(__file__).parent.parent / "examples"
BLOCK, RING = EXAMPLES / "third-party-backend", EXAMPLES / "third-party-ring"
FLASH3, FA4, TRITON = (EXAMPLES / f"third-party-{name}" for name in ("flash3", "fa4", "triton"))
KERNELS = {
    BLOCK: "ringattn_example.block",
    RING: "ringattn_example_ring.gather",
    FLASH3: "ringattn_example_flash3.kernel",
    FA4: "ringattn_example_fa4.kernel",
    TRITON: "ringattn_example_triton.kernel",
}


def descriptor(folder: Path) -> Backend:
    return importlib.import_module(f"{KERNELS[folder].split('.')[0]}.plugin").BACKEND


@pytest.mark.parametrize("folder", KERNELS, ids=lambda folder: folder.name)
def test_its_descriptor_imports_no_kernel(folder: Path):
    kernel = KERNELS[folder]
    code = f"import sys, {kernel.split('.')[0]}.plugin; sys.exit({kernel!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(folder / "src")})


def flash3(target: str, results: Any) -> Any:
    """Computes what a foreign function of FlashAttention-3 computes, and checks the shapes that it is called with."""

    def forward(q: Any, k: Any, v: Any, scale: Any, causal: bool) -> Any:
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * jnp.float32(scale)
        scores = jnp.where(jnp.tri(q.shape[1], k.shape[1], dtype=bool), scores, -jnp.inf) if causal else scores
        return scores, v

    def fwd(q: Any, k: Any, v: Any, *, softmax_scale: Any, is_causal: bool, **window: Any) -> Any:
        scores, v = forward(q, k, v, softmax_scale, is_causal)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v.astype(jnp.float32)).astype(q.dtype)
        return out, jax.nn.logsumexp(scores, -1)

    def bwd(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, softmax_scale: Any, is_causal: bool, **window: Any
    ) -> Any:
        p, pullback = jax.vjp(lambda *x: forward(*x, softmax_scale, is_causal), q, k, v)
        scores, values = p
        p, dout = jnp.exp(scores - lse[..., None]), dout.astype(jnp.float32)
        delta = jnp.einsum("btnh,btnh->bnt", dout, out.astype(jnp.float32))
        ds = p * (jnp.einsum("btnh,bsnh->bnts", dout, values.astype(jnp.float32)) - delta[..., None])
        return pullback((ds, jnp.einsum("bnts,btnh->bsnh", p, dout).astype(v.dtype)))

    def call(*arrays: Any, **attributes: Any) -> Any:
        assert attributes["window_size_left"] == attributes["window_size_right"] == -1
        assert all(x.shape[-1] % 8 == 0 for x in arrays if x.ndim == 4)
        found = {"dew_flash3_mha_fwd": fwd, "dew_flash3_mha_bwd": bwd}[target](*arrays, **attributes)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in results[: len(found)]]
        return (*found, *results[len(found) :])

    return call


def agrees_with_the_xla_backend(folder: Path, layout: str, tokens: int = 6) -> None:
    """Compares a ring of four ranks, its log-sum-exp if it declares that, and gradients with one of the xla backend."""
    draw = np.random.default_rng(0)
    operands = [jnp.asarray(draw.standard_normal((4, 2, tokens, heads, 12)), jnp.float16) for heads in (4, 2, 2)]
    sinks, with_lse = draw.standard_normal(4, np.float32), descriptor(folder).supports(Feature.RETURN_LSE)

    def gradients(backend: str) -> Any:
        def loss(query: Any, key: Any, value: Any, sinks: Any) -> jax.Array:
            options = {"causal": True, "axis_name": "sp", "layout": layout, "return_lse": with_lse}
            results = ring_attention(query, key, value, sinks, backend=backend, **options)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(results))

        def total(*arrays: Any) -> jax.Array:
            return jax.vmap(loss, (0, 0, 0, None), axis_name="sp")(*arrays).sum()

        return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(*operands, sinks)

    here = dataclasses.replace(descriptor(folder), platforms=("cpu",), probe=None)
    with registered(here):
        mine, theirs = (jax.tree.leaves(gradients(name)) for name in (here.name, "xla"))
    for got, want in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=5e-3, atol=5e-3)


def test_a_ring_of_flashattention_3_agrees_with_one_of_the_xla_backend(monkeypatch: pytest.MonkeyPatch):
    """Which calls the layouts make of the two functions is tested in core's `test_from_flash.py`."""
    monkeypatch.syspath_prepend(FLASH3 / "src")
    kernel = importlib.import_module(KERNELS[FLASH3])
    monkeypatch.setattr(kernel, "register", lambda: None)
    monkeypatch.setattr(jax.ffi, "ffi_call", flash3)
    agrees_with_the_xla_backend(FLASH3, "zigzag")


def test_a_ring_of_a_kernel_for_jax_triton_agrees_with_one_of_the_xla_backend(monkeypatch: pytest.MonkeyPatch):
    """The kernels run in ringattn-triton's interpreter, in tiles that no length divides."""
    from ringattn_triton.launch.interpreted import launch
    from ringattn_triton.launch.kernel_call import KernelCall

    def triton_call(
        *arrays: Any, kernel: Any, out_type: Any, grid: Any, num_warps: int, num_stages: int, **static: Any
    ):
        constants = tuple(static.items())
        call = KernelCall(kernel, tuple(out_type), grid, num_warps, num_stages, (), "example", constants, None, 1)
        return launch(arrays, call)

    module = ModuleType("jax_triton")
    module.triton_call = triton_call
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    monkeypatch.syspath_prepend(TRITON / "src")
    kernel = importlib.import_module(KERNELS[TRITON])
    monkeypatch.setattr(kernel, "TILE", 16)
    agrees_with_the_xla_backend(TRITON, "striped", tokens=20)


@pytest.mark.parametrize(("folder", "wheel"), [(FLASH3, "dew-flash-attn-cu13"), (FA4, "'fa4-jax")])
def test_an_attention_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    folder: Path, wheel: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(folder / "src")
    x = jnp.ones((1, 8, 2, 8), jnp.float16)
    here = dataclasses.replace(descriptor(folder), platforms=("cpu",))
    with registered(here), pytest.raises(BackendUnavailableError, match=f"pip install {wheel}"):
        ring_attention(x, x, x, backend=here.name)
