# SPDX-License-Identifier: Apache-2.0
"""Calls work under JAX's debugging flags: strict promotion, leak checks, NaN and infinity checks."""

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ringattn_core import decode_attention, masks, prefill_attention, ring_attention
from ringattn_core.call.cache import SENT

B, T, N, K, H = 2, 32, 4, 2, 8
LENGTHS = jnp.array([32, 19], jnp.int32)
IDS = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 8)[None].repeat(B, 0)
PADDED = IDS.at[:, 27:].set(-1)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "sp"))


# In each line: the arrays that are differentiated beside query, key and value; and the other options.
CALLS: dict[str, tuple[dict[str, jax.Array], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "window": ({}, {"sliding_window": (5, 0), "causal": True}),
    "chunk": ({}, {"chunk_size": 8}),
    "segments": ({}, {"q_segment_ids": IDS}),
    "padding": ({}, {"q_segment_ids": PADDED}),
    "rows that see nothing": ({}, {"attention_mask": jnp.zeros((1, 1, T, T), bool)}),
    "dense mask": ({}, {"attention_mask": jnp.tril(jnp.ones((1, 1, T, T), bool))}),
    "mask builder": ({}, {"mask_builder": lambda *_: masks.Prefix(9) | masks.Causal()}),
    "mask of each head": ({}, {"mask_builder": lambda q, k, heads, head, copies: masks.Local(head + 1)}),
    "positions": ({}, {"q_positions": jnp.arange(T, dtype=jnp.int32) % 9, "causal": True}),
    "sinks of each head": ({"softmax_aux": normal(3, N, 3)}, {}),
    "shared sinks and padding": ({"softmax_aux": normal(3, 3)}, {"q_segment_ids": PADDED}),
    "bias": ({"bias": normal(4, 1, N, T, T)}, {}),
    "bias of keys": ({"bias": normal(4, B, 1, 1, T)}, {}),
    "bias of -1e9": ({"bias": jnp.full((1, 1, T, T), -1e9, jnp.float32)}, {}),
    "slopes": ({"alibi_slopes": jnp.abs(normal(5, N))}, {}),
    "dropout": ({}, {"dropout_prob": 0.3, "dropout_seed": 3}),
    "soft cap": ({}, {"logits_soft_cap": 5.0}),
    "zigzag": ({}, {"layout": "zigzag", "causal": True}),
    "striped": ({}, {"layout": "striped", "causal": True}),
}
EVERYWHERE = pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "mesh"])


def gradient_of(call: str, on_mesh: bool, dtype: Any = jnp.float32, **more: Any) -> tuple[Any, tuple[Any, ...]]:
    """A function that returns the loss of a call and its gradients, and arguments for it."""
    extra, options = CALLS[call]
    options = options | ({"mesh": mesh(), "axis_name": "sp"} if on_mesh else {}) | more

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
        given = dict(extra)
        arrays = (q, k, v, given.pop("softmax_aux", None), given.pop("bias", None))
        return jnp.sum(jnp.sin(ring_attention(*arrays, **options, **given).astype(jnp.float32)))

    q, k, v = (normal(seed, B, T, heads, H).astype(dtype) for seed, heads in enumerate((N, K, K)))
    return jax.value_and_grad(loss, (0, 1, 2, 3)), (q, k, v, extra)


@contextlib.contextmanager
def strict_promotion() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


class TestStrictPromotion:
    @pytest.mark.parametrize("call", CALLS)
    @EVERYWHERE
    def test_no_rank_and_no_dtype_is_promoted(self, call: str, on_mesh: bool):
        gradient, arguments = gradient_of(call, on_mesh, jnp.float32 if on_mesh else jnp.bfloat16)
        with strict_promotion():
            jax.make_jaxpr(gradient)(*arguments)

    @pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
    def test_with_64_bits_no_strategy_promotes(self, strategy: str):
        two = Mesh(np.array(jax.devices()[:2]), ("sp",))
        with jax.enable_x64(True), strict_promotion():
            gradient, arguments = gradient_of("dropout", True, strategy=strategy, query_offset=3, mesh=two)
            jax.make_jaxpr(gradient)(*arguments)

    @pytest.mark.parametrize("attend", [decode_attention, *(partial(prefill_attention, send=x) for x in SENT)])
    def test_attention_to_a_cache_promotes_no_rank_and_no_dtype(self, attend: Any):
        with jax.enable_x64(True), strict_promotion():
            q, cache = normal(0, B, 8, N, H), normal(1, B, T, K, H)
            jax.make_jaxpr(lambda q, x: attend(q, x, x, LENGTHS, mesh=mesh(), axis_name="sp"))(q, cache)

    def test_the_flags_are_on(self):
        with strict_promotion(), pytest.raises(ValueError, match="jax_numpy_rank_promotion"):
            jnp.add(jnp.ones(3), jnp.ones((2, 3)))


@contextlib.contextmanager
def leaks_refused() -> Iterator[None]:
    """JAX looks for leaked tracers among all objects of Python. What other tests left behind is none of them."""
    gc.freeze()
    try:
        with jax.check_tracer_leaks():
            yield
    finally:
        gc.unfreeze()


class TestLeaks:
    @pytest.mark.parametrize("call", ["mask of each head", "dropout", "shared sinks and padding"])
    def test_no_tracer_leaves_its_trace(self, call: str):
        gradient, arguments = gradient_of(call, on_mesh=True)
        with leaks_refused():
            jax.make_jaxpr(gradient)(*arguments)

    def test_vmap_leaks_no_tracer(self):
        with leaks_refused():
            jax.make_jaxpr(jax.vmap(lambda q: ring_attention(q, q, q, causal=True)))(normal(0, 3, B, T, N, H))

    def test_a_leak_is_found(self):
        kept = []
        with leaks_refused(), pytest.raises(Exception, match="Leaked"):
            jax.make_jaxpr(lambda x: kept.append(x) or x)(1.0)


class TestNansAndInfinities:
    """With both flags, JAX checks every result that it computes outside `jax.jit`."""

    @pytest.mark.parametrize("call", ["rows that see nothing", "shared sinks and padding", "bias of -1e9"])
    @EVERYWHERE
    def test_intended_infinities_are_not_reported(self, call: str, on_mesh: bool):
        gradient, arguments = gradient_of(call, on_mesh)
        with jax.debug_nans(True), jax.debug_infs(True):
            jax.block_until_ready(gradient(*arguments))

    def test_intended_infinities_are_not_reported_in_a_shard_map_under_jit(self):
        split = P("data", "sp")

        def local(q: jax.Array, ids: jax.Array) -> jax.Array:
            return ring_attention(q, q, q, q_segment_ids=ids, axis_name="sp", batch_axis_name="data")

        shard = jax.shard_map(local, mesh=mesh(), in_specs=(split, split), out_specs=split)
        with jax.debug_nans(True), jax.debug_infs(True):
            jax.block_until_ready(jax.jit(jax.grad(lambda q: shard(q, PADDED).sum()))(normal(0, B, T, N, H)))

    @EVERYWHERE
    def test_a_nan_of_the_caller_is_reported(self, on_mesh: bool):
        (gradient, (q, k, v, extra)) = gradient_of("padding", on_mesh)
        with jax.debug_nans(True), jax.debug_infs(True), pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(gradient(q, k, v.at[0, 5].set(jnp.nan), extra))

    def test_an_infinite_output_is_reported(self):
        q = normal(0, B, T, N, H)
        with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
            jnp.multiply(ring_attention(q, q, jnp.full_like(q, 3e38)), 2.0)
