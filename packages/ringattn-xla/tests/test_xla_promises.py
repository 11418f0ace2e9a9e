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
from block_problem import problem_of
from jax.sharding import Mesh, PartitionSpec
from ringattn_conformance.blocks import make_block
from ringattn_conformance.oracle import attend
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


def test_two_blocks_in_a_row_are_one() -> None:
    whole = make_block(2, 20, 48, heads=4, params=tiles(16), causal=True, window=(12, None))
    first = whole.map_keys(lambda x, axis: jax.lax.slice_in_dim(x, 0, 19, axis=axis))
    second = whole.map_keys(lambda x, axis: jax.lax.slice_in_dim(x, 19, 48, axis=axis))
    want = attend(problem_of(whole))
    got = KERNEL.forward(second, KERNEL.forward(first, None))
    np.testing.assert_allclose(got.out, want.out, atol=2e-6)
    np.testing.assert_allclose(got.lse, want.lse, atol=2e-6)


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_without_keys_are_zero_and_send_nothing(dtype: Any) -> None:
    segments = np.array([[-1] * 5 + [0] * 15, [3] * 20], np.int32)
    block = make_block(2, 20, 20, dtype=dtype, params=tiles(8), q_segments=segments, kv_segments=segments.clip(max=0))
    partial = KERNEL.forward(block, None)
    assert not np.asarray(partial.out)[0, :5].any() and not np.asarray(partial.out)[1].any()
    assert np.isneginf(np.asarray(partial.lse)[1]).all() and np.isfinite(np.asarray(partial.out)).all()
    grads = _backward(block, partial)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    assert not np.asarray(grads.dq)[1].any() and not np.asarray(grads.dk)[1].any()


@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min, -1e9, np.nextafter(np.float32(-1e5), -np.inf)])
def test_a_bias_below_minus_100000_forbids(low: float) -> None:
    bias = np.where(np.random.default_rng(2).random((1, 2, 12, 12)) < 0.4, low, 0.5).astype(np.float32)
    bias[0, 0, 3] = low
    block = make_block(1, 12, 12, params=tiles(8), bias=bias, soft_cap=5.0)
    partial = KERNEL.forward(block, None)
    np.testing.assert_allclose(partial.out, attend(problem_of(block)).out, atol=2e-6)
    grads = _backward(block, partial)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    assert grads.dbias is not None and not np.asarray(grads.dbias)[bias < 0].any()
    assert not np.asarray(partial.out)[0, 3, 0].any() and np.isneginf(partial.lse[0, 0, 3])


@pytest.mark.parametrize("low", [-9e4, -1e5])
def test_a_bias_down_to_minus_100000_on_a_whole_row_leaves_its_weights(low: float) -> None:
    block = make_block(1, 12, 12, params=tiles(8), bias=np.full((1, 2, 12, 12), low, np.float32))
    plain = KERNEL.forward(dataclasses.replace(block, bias=None), None)
    # A score near -1e5 has 7 bits after the point in float32.
    np.testing.assert_allclose(KERNEL.forward(block, None).out, plain.out, atol=2e-2)


def test_a_key_that_is_nan_makes_every_row_nan_that_sees_it() -> None:
    block = make_block(1, 16, 16, params=tiles(8), causal=True)
    out = np.asarray(KERNEL.forward(dataclasses.replace(block, kv=block.kv.at[0, :, 10].set(NAN)), None).out)
    assert np.isnan(out[:, 10:]).all()


def test_keys_and_values_may_be_a_pair() -> None:
    block = make_block(1, 20, 20, params=tiles(8), causal=True)
    pair = dataclasses.replace(block, kv=(block.k, block.v))
    partial = KERNEL.forward(block, None)
    _same(KERNEL.forward(pair, None), partial)
    _same(_backward(pair, partial), _backward(block, partial))


def test_huge_scores_neither_overflow_nor_vanish() -> None:
    block = make_block(1, 16, 24, params=tiles(8), scale=4000.0)
    want = attend(problem_of(block))
    assert np.abs(want.lse).max() > 1e4
    got = KERNEL.forward(block, None)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-5)
    assert np.abs(np.asarray(got.out) - want.out).max() < 2e-5 * np.abs(want.lse).max() / 32
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(_backward(block, got)))


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


@pytest.mark.parametrize("check_vma", [True, False])
def test_it_runs_in_a_shard_map_whatever_varies(check_vma: bool) -> None:
    block = make_block(4, 12, 20, params=tiles(8), causal=True, bias=np.ones((1, 2, 12, 20), np.float32))
    partial = KERNEL.forward(block, None)
    grads = _backward(block, partial)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, kept, stacked = PartitionSpec("data"), PartitionSpec(), PartitionSpec(None, "data")

    def local(q: jax.Array, kv: jax.Array, rest: Block) -> Any:
        mine = dataclasses.replace(rest, q=q, kv=kv, batch_index=rest.batch_index[:2])
        partial = KERNEL.forward(mine, None)
        grads = _backward(mine, partial)
        return partial.out, grads.dq, grads.dk

    rest = dataclasses.replace(block, q=block.q[:2], kv=block.kv[:, :2])
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, stacked, kept), out_specs=rows, check_vma=check_vma))(
        block.q, block.kv, rest
    )
    for value, wanted in zip(got, (partial.out, grads.dq, grads.dk), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-5)


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


def test_each_pass_is_one_loop() -> None:
    block = make_block(2, 64, 64, heads=4, params=tiles(16), causal=True)
    partial = KERNEL.forward(block, None)
    for program in (jax.make_jaxpr(KERNEL.forward)(block, partial), jax.make_jaxpr(_backward)(block, partial)):
        assert str(program).count("= while[") == 1


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


def test_hops_are_not_fused_with_each_other():
    block = make_block()
    partial = KERNEL.forward(block, None)
    barriers = str(jax.make_jaxpr(KERNEL.forward)(block, partial)).count("optimization_barrier")
    assert barriers == 1
