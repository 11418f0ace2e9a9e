# SPDX-License-Identifier: Apache-2.0
"""The examples of third-party backends are inert; those for a GPU are correct, and say what is not installed.

`nox -s thirdparty` certifies the two that run on a CPU: their numbers, and that they refuse what they lack.
"""

import dataclasses
import functools
import importlib
import os
import re
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
FLASH3, FA4, TRITON, TOKAMAX = (EXAMPLES / f"third-party-{name}" for name in ("flash3", "fa4", "triton", "tokamax"))
KERNELS = {
    BLOCK: "ringattn_example.block",
    RING: "ringattn_example_ring.gather",
    FLASH3: "ringattn_example_flash3.kernel",
    FA4: "ringattn_example_fa4.kernel",
    TRITON: "ringattn_example_triton.kernel",
    TOKAMAX: "ringattn_example_tokamax.kernel",
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


def agrees_with_the_xla_backend(folder: Path, layout: str, tokens: int = 6, **mask: Any) -> None:
    """Compares a ring of four ranks, its log-sum-exp if it declares that, and gradients with one of the xla backend.

    `mask` are options of the call; by default it is causal.
    """
    draw = np.random.default_rng(0)
    operands = [jnp.asarray(draw.standard_normal((4, 2, tokens, heads, 12)), jnp.float16) for heads in (4, 2, 2)]
    sinks, with_lse = draw.standard_normal(4, np.float32), descriptor(folder).supports(Feature.RETURN_LSE)

    def gradients(backend: str) -> Any:
        def loss(query: Any, key: Any, value: Any, sinks: Any) -> jax.Array:
            options = {"axis_name": "sp", "layout": layout, "return_lse": with_lse, **(mask or {"causal": True})}
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


class Tokamax:
    """What tokamax's two kernels compute of one batch row, in plain JAX, and the lengths that they are called with.

    With ranges by head, dk and dv are those of the first head of each group, as on an H200.
    """

    Config = dict

    @staticmethod
    def scores(q: Any, k: Any, ends: Any, scale: float, causal: bool) -> Any:
        assert len(q) % 128 == len(k) % 128 == 0
        assert scale > 0
        s = jnp.einsum("tnh,snh->nts", q, jnp.repeat(k, q.shape[1] // k.shape[1], 1), preferred_element_type="float32")
        ends = (jnp.zeros(len(q), int), jnp.arange(len(q)) + 1) if causal else ends
        first, last = (jnp.asarray(x).reshape(-1, len(q), 1) for x in ends)
        keys = jnp.arange(len(k)).reshape(1, 1, -1)
        return jnp.where((keys >= first) & (keys < last), s * scale, -jnp.inf)

    @classmethod
    def flash_attention_kernel(
        cls, q: Any, k: Any, v: Any, bias: None, mask: None, *ends: Any, is_causal: bool, logits_scale: float, **_: Any
    ) -> Any:
        s, v = cls.scores(q, k, ends, logits_scale, is_causal), jnp.repeat(v, q.shape[1] // v.shape[1], 1)
        m = s.max(-1)
        p = jnp.exp(s - m[..., None])
        total = p.sum(-1)
        out = jnp.einsum("nts,snh->tnh", p / total[..., None], v.astype(jnp.float32))
        return out.astype(q.dtype), (m, total)

    @classmethod
    def flash_attention_vjp_kernel(
        cls, q: Any, k: Any, v: Any, residuals: Any, out: Any, dout: Any, bias: None, mask: None, *ends: Any,
        is_causal: bool, logits_scale: float, **_: Any,
    ) -> Any:  # fmt: skip
        group, (m, total) = q.shape[1] // k.shape[1], residuals
        delta = jnp.einsum("tnh,tnh->nt", out, dout, preferred_element_type=jnp.float32)

        def derivatives(ends: Any) -> tuple[Any, Any]:
            p = jnp.exp(cls.scores(q, k, ends, logits_scale, is_causal) - m[..., None]) / total[..., None]
            dp = jnp.einsum("tnh,snh->nts", dout, jnp.repeat(v, group, 1), preferred_element_type=jnp.float32)
            return p, p * (dp - delta[..., None]) * logits_scale

        ds = derivatives(ends)[1]
        p_of_keys, ds_of_keys = derivatives(
            tuple(x if x is None or len(x) == 1 else jnp.repeat(x[::group], group, 0) for x in ends)
        )
        dq = jnp.einsum("nts,snh->tnh", ds, jnp.repeat(k, group, 1).astype(jnp.float32))
        dk = jnp.einsum("nts,tnh->snh", ds_of_keys, q.astype(jnp.float32))
        dv = jnp.einsum("nts,tnh->snh", p_of_keys, dout.astype(jnp.float32))
        dk, dv = (x.reshape(len(k), -1, group, x.shape[-1]).sum(2) for x in (dk, dv))
        return *(x.astype(dout.dtype) for x in (dq, dk, dv)), None


@pytest.fixture
def tokamax(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel module of the example, over `Tokamax` in place of tokamax."""
    monkeypatch.syspath_prepend(TOKAMAX / "src")
    kernel = importlib.import_module(KERNELS[TOKAMAX])
    monkeypatch.setattr(kernel, "of_tokamax", lambda name: Tokamax)
    monkeypatch.setattr(kernel, "architecture", lambda: 90)
    return kernel


IDS = np.array([[0, 0, 4, 4, 1, -1]] * 2, np.int32)


@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True, "sliding_window": 9},
        {"causal": True, "q_segment_ids": IDS, "softmax_scale": -0.3},
        {"kv_range": (np.broadcast_to(np.int32([[[0], [5], [9], [2]]]), (2, 4, 6)), np.full((2, 4, 6), 20, np.int32))},
    ],
    ids=["causal", "window", "documents", "ranges of heads"],
)
def test_a_ring_of_tokamax_agrees_with_one_of_the_xla_backend(tokamax: Any, mask: dict[str, Any]):
    """The lengths are no multiple of a tile, and the cotangent of the log-sum-exp reaches the gradients."""
    agrees_with_the_xla_backend(TOKAMAX, "zigzag" if mask == {} else "contiguous", **mask)


def test_tokamax_s_sum_of_dout_and_out_is_delta_where_dout_is_zero_too(tokamax: Any):
    dout = jnp.asarray([[2.0, -3.0], [0.0, 0.0], [0.0, 0.0], [1e-7, 0.0]], jnp.float16).reshape(1, 4, 1, 2)
    delta = jnp.asarray([0.7, 0.3, 0.0, 1.5]).reshape(1, 4, 1, 1)
    cotangent, out = tokamax.cotangent_and_output_of(dout, delta)
    assert np.allclose((cotangent.astype(jnp.float32) * out).sum(-1), delta[..., 0], atol=1e-6)
    assert np.abs(np.float32(cotangent) - np.float32(dout)).max() <= 2.0**-24


def test_a_window_of_1024_in_a_ring_of_tokamax_sends_1024_rows(tokamax: Any):
    """Traced only: each rank has 4,096 tokens."""
    x = jax.ShapeDtypeStruct((1, 4 * 4096, 2, 64), jnp.bfloat16)
    split, automatic = jax.sharding.PartitionSpec(None, "sp"), (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("sp",), axis_types=automatic)
    here = dataclasses.replace(descriptor(TOKAMAX), platforms=("cpu",), probe=None)
    options = {"causal": True, "sliding_window": 1023, "axis_name": "sp"}
    with registered(here):
        call = functools.partial(ring_attention, backend=here.name, **options)
        program = jax.make_jaxpr(jax.shard_map(call, mesh=mesh, in_specs=(split,) * 3, out_specs=split))(x, x, x)
    assert re.findall(r":u16\[2,1,(\d+),2,64\]\S* = ppermute", str(program)) == ["1024"]


@pytest.mark.parametrize(
    ("folder", "wheel"), [(FLASH3, "dew-flash-attn-cu13"), (FA4, "'fa4-jax"), (TOKAMAX, "'tokamax")]
)
def test_an_attention_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    folder: Path, wheel: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(folder / "src")
    x = jnp.ones((1, 8, 2, 8), jnp.float16)
    here = dataclasses.replace(descriptor(folder), platforms=("cpu",))
    with registered(here), pytest.raises(BackendUnavailableError, match=f"pip install {wheel}"):
        ring_attention(x, x, x, backend=here.name)
