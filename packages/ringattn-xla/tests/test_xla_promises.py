# SPDX-License-Identifier: Apache-2.0
"""Promises beyond numbers: what is skipped, what stays finite, what it costs, and where it runs."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from ringattn_conformance.blocks import make_block
from ringattn_core import ring_attention
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.contract.features import Feature
from ringattn_core.contract.protocol import Block, BlockKernel, Gradients, Partial
from ringattn_xla.block import KERNEL
from ringattn_xla.plugin import BACKEND
from ringattn_xla.tiling import choose, cut

NAN = float("nan")


def tiles(length: int) -> dict[str, int]:
    return {"q_blocksize": length, "kv_blocksize": length}


def _backward(block: Block, partial: Partial) -> Gradients:
    """The gradients of `sum(out ** 2) / 2` of this block alone."""
    delta = jnp.swapaxes((partial.out * partial.out).sum(-1), 1, 2)
    return KERNEL.backward(block, partial.out.astype(block.q.dtype), partial.lse, delta, jnp.zeros_like(partial.out))


def _same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_block_that_nobody_sees_changes_no_bit_and_has_no_gradient() -> None:
    seen = make_block(1, 16, 16, params=tiles(8), causal=True)
    partial = KERNEL.forward(seen, None)
    later = make_block(1, 16, 16, params=tiles(8), causal=True, offset=100)
    _same(KERNEL.forward(later, partial), partial)
    dq = jnp.asarray(np.random.default_rng(1).normal(size=later.q.shape), jnp.float32)
    grads = KERNEL.backward(later, partial.out, partial.lse, partial.lse, dq)
    _same((grads.dq, grads.dk, grads.dv), (dq, jnp.zeros_like(later.k), jnp.zeros_like(later.v)))


SKIPPED: dict[str, Any] = {
    "causal": ({"causal": True}, slice(32, 64), slice(0, 0)),
    "window": ({"window": (0, 8)}, slice(0, 0), slice(40, 64)),
    "segments of each row": (
        {"q_segments": np.repeat([[0], [1]], 64, 1), "kv_segments": np.repeat([[0, 2], [1, 2]], 32, 1)},
        slice(32, 64),
        slice(0, 0),
    ),
    "dense mask": ({"mask": np.arange(64)[None, None, None] < np.full((1, 1, 64, 1), 32)}, slice(32, 64), slice(0, 0)),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_tiles_that_nobody_sees_are_not_touched(name: str) -> None:
    """Anything times NaN is NaN: one product with the poisoned keys, values or output gradients would show."""
    fields, keys, queries = SKIPPED[name]
    block = make_block(2, 64, 64, params=tiles(8), **fields)
    if name == "causal":
        block = block.map_queries(lambda x, axis: jax.lax.slice_in_dim(x, 0, 32, axis=axis))
    if name == "window":
        block = block.map_keys(lambda x, axis: jax.lax.slice_in_dim(x, 0, 32, axis=axis))
    poisoned = dataclasses.replace(block, kv=block.kv.at[:, :, keys].set(NAN))
    clean = KERNEL.forward(block, None)
    _same(KERNEL.forward(poisoned, None), clean)
    delta = jnp.swapaxes((clean.out * clean.out).sum(-1), 1, 2)
    wanted = KERNEL.backward(block, clean.out, clean.lse, delta, jnp.zeros_like(clean.out))
    dout = clean.out.at[:, queries].set(NAN)
    _same(KERNEL.backward(poisoned, dout, clean.lse, delta, jnp.zeros_like(clean.out)), wanted)


def test_keys_and_values_may_be_a_pair() -> None:
    block = make_block(1, 20, 20, params=tiles(8), causal=True)
    pair = dataclasses.replace(block, kv=(block.k, block.v))
    partial = KERNEL.forward(block, None)
    _same(KERNEL.forward(pair, None), partial)
    _same(_backward(pair, partial), _backward(block, partial))


def _temporary(length: int, backward: bool) -> int:
    block = make_block(1, length, length, heads=2, dim=16, params=tiles(64), causal=True)
    partial = KERNEL.forward(block, None)
    step = _backward if backward else KERNEL.forward
    analysis = jax.jit(step).lower(block, partial).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear_in_the_length(backward: bool) -> None:
    short, long = _temporary(1024, backward), _temporary(4096, backward)
    linear = 2 * 4096 * 16 * 4
    assert long <= 4 * short and long < 4 * linear, (short, long, linear)


def test_it_maps_over_blocks_whose_visible_tiles_differ() -> None:
    blocks = [make_block(1, 20, 20, params=tiles(8), causal=True, draw_seed=n, offset=9 * n) for n in range(3)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *blocks)

    def both(block: Block) -> Any:
        partial = KERNEL.forward(block, None)
        return partial, _backward(block, partial)

    got = jax.vmap(both)(together)
    for n, block in enumerate(blocks):
        jax.tree.map(lambda a, b, n=n: np.testing.assert_allclose(a[n], b, atol=1e-5), got, both(block))


def test_two_runs_give_the_same_bits() -> None:
    block = make_block(
        2, 100, 70, heads=4, kv_heads=1, params=tiles(32), dropout=0.1, seed=np.zeros(2, np.uint32), causal=True
    )
    runs = [jax.tree.leaves((p := KERNEL.forward(block, None), _backward(block, p))) for _ in range(2)]
    _same(*runs)


@pytest.mark.parametrize(("asked", "expected"), [(None, "HIGHEST"), ("default", "DEFAULT")])
def test_float32_products_are_exact_unless_the_call_asks_for_less(asked: str | None, expected: str) -> None:
    block = make_block(1, 8, 8, precision=asked)
    partial = KERNEL.forward(block, None)
    with jax.default_matmul_precision("bfloat16"):
        programs = [str(jax.make_jaxpr(step)(block, partial)) for step in (KERNEL.forward, _backward)]
    for program, products in zip(programs, (2, 5), strict=True):
        assert program.count("dot_general[") == products
        assert program.count(f"precision=(Precision.{expected}, Precision.{expected})") == products


def test_tiles_are_near_equal_and_as_the_caller_says() -> None:
    assert [cut(length, 512) for length in (1, 7, 512, 521, 1000, 8192)] == [1, 7, 512, 264, 504, 512]
    block = make_block(1, 96, 64)
    assert choose(block, FwdParams(q_blocksize=32, kv_blocksize=16))[2:] == (32, 16)
    assert choose(block, BwdParams(q_blocksize=5, kv_blocksize=64))[2:] == (5, 64)
    assert choose(make_block(1, 2048, 2048), FwdParams())[2:] == (512, 512)
    assert choose(make_block(1, 2048, 2048, window=(512, 511)), FwdParams())[2:] == (256, 256)


def test_the_descriptor_is_inert_and_declares_everything() -> None:
    code = "import sys, ringattn_xla.plugin; print([n for n in sys.modules if n.startswith('ringattn_xla.')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == "['ringattn_xla.plugin']"
    assert all(BACKEND.supports(feature) for feature in Feature)
    assert BACKEND.kernel == "ringattn_xla.block:KERNEL" and isinstance(KERNEL, BlockKernel)


def test_a_gradient_outside_jit_compiles_in_time():
    """Compiled alone, the hops of a forward ring once became one kernel, which took XLA of JAX 0.11 over 15 minutes."""
    query, key = jnp.ones((1, 40, 4, 8)), jnp.ones((1, 40, 2, 8))
    mesh = Mesh(jax.devices()[:4], ("sp",))
    gradient = jax.grad(lambda query: ring_attention(query, key, key, mesh=mesh, axis_name="sp", backend="xla").sum())
    assert np.isfinite(gradient(query)).all()
