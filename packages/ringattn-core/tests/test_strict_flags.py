# SPDX-License-Identifier: Apache-2.0
"""Calls work under JAX's debugging flags: 64 bits, leak checks, NaN and infinity checks.

Every test of the packages forbids to promote a rank or a dtype (`packages/conftest.py`).
"""

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ringattn_core import decode_attention, masks, prefill_attention, ring_attention
from ringattn_core.call.cache import SENT
from ringattn_testing.rings import mesh_of, query_key_value

B, T, N, K = 2, 32, 4, 2
LENGTHS = jnp.array([32, 19], jnp.int32)
IDS = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 8)[None].repeat(B, 0)
PADDED = IDS.at[:, 27:].set(-1)


RING: dict[str, Any] = {"mesh": mesh_of(data=2, sp=4), "axis_name": "sp"}

# In each line: the arrays that are differentiated beside query, key and value; and the other options.
CALLS: dict[str, tuple[dict[str, jax.Array], dict[str, Any]]] = {
    "padding": ({}, {"q_segment_ids": PADDED}),
    "rows that see nothing": ({}, {"attention_mask": jnp.zeros((1, 1, T, T), bool)}),
    "mask of each head": ({}, {"mask_builder": lambda q, k, heads, head, copies: masks.Local(head + 1)}),
    "shared sinks and padding": ({"softmax_aux": jnp.arange(3.0)}, {"q_segment_ids": PADDED}),
    "bias of -1e9": ({"bias": jnp.full((1, 1, T, T), -1e9, jnp.float32)}, {}),
    "dropout": ({}, {"dropout_prob": 0.3, "dropout_seed": 3}),
}
EVERYWHERE = pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "mesh"])


def gradient_of(call: str, on_mesh: bool, **more: Any) -> tuple[Any, tuple[Any, ...]]:
    """A function that returns the loss of a call and its gradients, and arguments for it."""
    extra, options = CALLS[call]
    options = options | (RING if on_mesh else {}) | more

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, extra: dict[str, jax.Array]) -> jax.Array:
        given = dict(extra)
        arrays = (q, k, v, given.pop("softmax_aux", None), given.pop("bias", None))
        return jnp.sum(jnp.sin(ring_attention(*arrays, **options, **given)))

    return jax.value_and_grad(loss, (0, 1, 2, 3)), (*query_key_value(B, T, N, K), extra)


class TestSixtyFourBits:
    @pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
    def test_no_strategy_promotes(self, strategy: str):
        with jax.enable_x64(True):
            gradient, arguments = gradient_of("dropout", True, strategy=strategy, query_offset=3, mesh=mesh_of(sp=2))
            jax.make_jaxpr(gradient)(*arguments)

    @pytest.mark.parametrize("attend", [decode_attention, *(partial(prefill_attention, send=x) for x in SENT)])
    def test_attention_to_a_cache_promotes_no_rank_and_no_dtype(self, attend: Any):
        with jax.enable_x64(True):
            q, cache, _ = query_key_value(B, T, N, K)
            jax.make_jaxpr(lambda q, x: attend(q, x, x, LENGTHS, **RING))(q[:, :8], cache)


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
    @pytest.mark.parametrize("call", ["mask of each head", "shared sinks and padding"])
    def test_no_tracer_leaves_its_trace(self, call: str):
        gradient, arguments = gradient_of(call, on_mesh=True)
        with leaks_refused():
            jax.make_jaxpr(gradient)(*arguments)

    def test_the_exchange_of_heads_leaks_no_tracer(self):
        """Fewer key heads than ranks, so keys are copied. JAX's own `all_to_all` leaks tracers where it is derived."""
        attend = partial(ring_attention, mesh=mesh_of(sp=2), axis_name="sp", strategy="ulysses")
        with leaks_refused():
            jax.make_jaxpr(attend)(*query_key_value(B, T, 2, 1))

    def test_vmap_leaks_no_tracer(self):
        with leaks_refused():
            jax.make_jaxpr(jax.vmap(lambda q: ring_attention(q, q, q, causal=True)))(jnp.ones((3, B, T, N, 8)))


class TestNansAndInfinities:
    """With both flags, JAX checks every result that it computes outside `jax.jit`."""

    @pytest.mark.parametrize("call", ["rows that see nothing", "shared sinks and padding", "bias of -1e9"])
    @EVERYWHERE
    def test_intended_infinities_are_not_reported(self, call: str, on_mesh: bool):
        gradient, arguments = gradient_of(call, on_mesh)
        with jax.debug_nans(True), jax.debug_infs(True):
            jax.block_until_ready(gradient(*arguments))

    @EVERYWHERE
    def test_a_nan_of_the_caller_is_reported(self, on_mesh: bool):
        (gradient, (q, k, v, extra)) = gradient_of("padding", on_mesh)
        with jax.debug_nans(True), jax.debug_infs(True), pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(gradient(q, k, v.at[0, 5].set(jnp.nan), extra))
