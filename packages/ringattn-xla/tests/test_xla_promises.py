# SPDX-License-Identifier: Apache-2.0
"""Promises beyond numbers: what is skipped, what stays finite, what it costs, and where it runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from ringattn_core import ring_attention
from ringattn_core.contract.features import Feature
from ringattn_core.contract.protocol import Block, BlockKernel, Gradients, Partial
from ringattn_testing.random_blocks import make_block
from ringattn_xla.block import KERNEL
from ringattn_xla.plugin import BACKEND

NAN = float("nan")


def tiles(length: int) -> dict[str, int]:
    return {"q_blocksize": length, "kv_blocksize": length}


def _backward(block: Block, partial: Partial) -> Gradients:
    """The gradients of `sum(out ** 2) / 2` of this block alone."""
    assert partial.out is not None
    delta = jnp.swapaxes((partial.out * partial.out).sum(-1), 1, 2)
    return KERNEL.backward(block, partial.out.astype(block.q.dtype), partial.lse, delta, jnp.zeros_like(partial.out))


def _same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


SKIPPED: dict[str, Any] = {
    "causal": ({"causal": True}, slice(32, 64), slice(0, 0)),
    "window": ({"sliding_window": (0, 8)}, slice(0, 0), slice(40, 64)),
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


@pytest.mark.parametrize(
    "scored", [{}, {"bias": np.ones((2, 4, 41, 53)), "logits_soft_cap": 3.0, "sliding_window": (40, 0)}]
)
def test_the_gradient_of_slopes_in_half_precision_is_as_exact_as_in_float32(scored: dict[str, Any]) -> None:
    """The rest of its error in a call is that of `delta`, which comes from the rounded output: `docs/numerics.md`."""
    slopes = np.array([[0.5, 0.1, 0.02, 0.3]], np.float32)
    block = make_block(2, 41, 53, heads=4, kv_heads=2, dtype=jnp.bfloat16, causal=True, slopes=slopes, **scored)
    draw, lse = np.random.default_rng(9), KERNEL.forward(block, None).lse
    dout = jnp.asarray(draw.normal(size=block.q.shape), jnp.bfloat16)
    delta = jnp.asarray(draw.normal(size=lse.shape), jnp.float32)
    wide = dataclasses.replace(block, q=block.q.astype(jnp.float32), kv=block.kv.astype(jnp.float32))
    got = KERNEL.backward(block, dout, lse, delta, None).dslopes
    want = np.asarray(KERNEL.backward(wide, dout.astype(jnp.float32), lse, delta, None).dslopes)
    np.testing.assert_allclose(got, want, atol=5e-5 * np.abs(want).max())


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


@pytest.mark.parametrize(("asked", "expected"), [(None, "HIGHEST"), ("default", "DEFAULT")])
def test_float32_products_are_exact_unless_the_call_asks_for_less(asked: str | None, expected: str) -> None:
    block = make_block(1, 8, 8, precision=asked)
    partial = KERNEL.forward(block, None)
    with jax.default_matmul_precision("bfloat16"):
        programs = [str(jax.make_jaxpr(step)(block, partial)) for step in (KERNEL.forward, _backward)]
    for program, products in zip(programs, (2, 5), strict=True):
        assert program.count("dot_general[") == products
        assert program.count(f"precision=(Precision.{expected}, Precision.{expected})") == products


def test_the_descriptor_declares_everything() -> None:
    assert all(BACKEND.supports(feature) for feature in Feature)
    assert BACKEND.kernel == "ringattn_xla.block:KERNEL" and isinstance(KERNEL, BlockKernel)


def test_a_gradient_outside_jit_compiles_in_time():
    """Compiled alone, the hops of a forward ring once became one kernel, which took XLA of JAX 0.11 over 15 minutes."""
    query, key = jnp.ones((1, 40, 4, 8)), jnp.ones((1, 40, 2, 8))
    mesh = Mesh(jax.devices()[:4], ("sp",))
    gradient = jax.grad(lambda query: ring_attention(query, key, key, mesh=mesh, axis_name="sp", backend="xla").sum())
    assert np.isfinite(gradient(query)).all()
