# SPDX-License-Identifier: Apache-2.0
"""A vmapped axis is folded into the batch, and every example has the gradient that it has without vmap."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import Backend, Feature, Gradients, Partial, ring_attention
from ringattn_core.backends import discovery
from ringattn_core.contract.merge import empty
from ringattn_testing.rings import close, differentiated, drawn, graded, mesh_of

V, B, T, N, H = 3, 2, 6, 2, 4


def inputs() -> dict[str, jax.Array]:
    key = iter(jax.random.split(jax.random.key(0), 8))
    x = {name: jax.random.normal(next(key), (V, B, T, N, H)) for name in "qkv"}
    x["bias"] = jax.random.normal(next(key), (V, 1, N, 1, T))
    x["slopes"] = jax.random.uniform(next(key), (V, N))
    x["sinks"] = jax.random.normal(next(key), (V, N))
    x["ids"] = jax.random.randint(next(key), (V, B, T), -1, 2)
    x["positions"] = jnp.sort(jax.random.randint(next(key), (V, T), 0, 9), -1)
    return x


def one(x: dict[str, Any], seed: Any = 3) -> Any:
    return ring_attention(
        x["q"], x["k"], x["v"], x["sinks"], x["bias"], alibi_slopes=x["slopes"], q_segment_ids=x["ids"],
        q_positions=x["positions"], causal=True, dropout_prob=0.2, dropout_seed=seed,
    )  # fmt: skip


FLOATS = ("q", "k", "v", "bias", "slopes", "sinks")


@pytest.mark.parametrize("shared", [("k", "v", "bias", "slopes"), ("q", "ids", "positions", "sinks")])
def test_a_vmapped_call_and_its_gradients_are_those_of_each_example(shared: tuple[str, ...]):
    x = inputs()
    x = {name: a[0] if name in shared else a for name, a in x.items()}
    axes = {name: None if name in shared else 0 for name in x}

    def each(floats: dict[str, Any]) -> Any:
        picked = [{name: a if axes[name] is None else a[i] for name, a in (x | floats).items()} for i in range(V)]
        return jnp.stack([one(example) for example in picked])

    floats = {name: x[name] for name in FLOATS}
    close(graded(lambda floats: jax.vmap(one, (axes,))(x | floats), floats), graded(each, floats), 5e-5)


def test_nested_vmaps_and_a_vmapped_seed_give_the_result_of_each_example():
    x = inputs()
    seeds = jnp.arange(V, dtype=jnp.uint32)
    got = jax.vmap(lambda s: jax.vmap(one, (0, None))(x, s))(seeds)
    for s in range(V):
        for i in range(V):
            np.testing.assert_allclose(got[s, i], one(jax.tree.map(lambda a: a[i], x), seeds[s]), atol=2e-5)  # noqa: B023


def test_numpy_arrays_that_a_vmapped_call_with_a_mesh_closes_over_are_constants():
    x = {name: np.asarray(array) for name, array in inputs().items()}
    mesh = mesh_of(sp=2)

    def mapped(**ring: Any) -> Any:
        return jax.vmap(lambda query: ring_attention(query, x["k"][0], x["v"][0], causal=True, **ring))

    close(differentiated(mapped(mesh=mesh, axis_name="sp"))(x["q"]), graded(mapped(), x["q"]), 5e-5)


def test_nested_vmaps_play_a_ring_over_two_axes():
    operands = drawn(*[(2, 2, B, T, N, H)] * 3)

    def ring(*shards: Any) -> Any:
        return ring_attention(*shards, causal=True, axis_name=("outer", "inner"))

    def whole(*operands: Any) -> Any:
        joined = (jnp.moveaxis(x, 2, 0).reshape(B, 4 * T, N, H) for x in operands)
        return jnp.moveaxis(ring_attention(*joined, causal=True).reshape(B, 2, 2, T, N, H), 0, 2)

    played = jax.vmap(jax.vmap(ring, axis_name="inner"), axis_name="outer")
    close(graded(played, *operands), graded(whole, *operands), 5e-5)


def test_a_kernel_without_batching_rules_is_never_vmapped():
    shapes = []

    class Spy:
        """A kernel that computes nothing, and records the shapes of its inputs."""

        def forward(self, block: Any, partial: Partial) -> Partial:
            shapes.append((block.q.shape, block.k.shape, block.q_positions.shape))
            return empty(block)

        def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Gradients:
            return Gradients(dq, jnp.zeros(block.k.shape), jnp.zeros(block.v.shape))

    spy = Backend(name="spy", api=1, platforms=("cpu",), kernel="a:b", features={Feature.FLOAT32})
    x = inputs()
    with discovery.registered(spy, Spy()):
        jax.vmap(lambda q, k, v: ring_attention(q, k, v, backend="spy"))(x["q"], x["k"], x["v"])
    assert shapes[-1] == ((V * B, T, N, H), (V * B, T, N, H), (1, T))


def test_the_gradient_of_a_bias_that_a_batch_shares_is_rounded_once():
    """200 rows add 1.0038 each: 201 in bfloat16, but 200 if each were rounded first."""

    class Adder:
        """A kernel that computes nothing but `dbias`, to which every row of the batch adds 1.0038."""

        def forward(self, block: Any, partial: Partial | None) -> Partial:
            return dataclasses.replace(empty(block), lse=jnp.zeros_like(empty(block).lse))

        def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Gradients:
            rows = block.q.shape[0] // block.bias.shape[0]
            dtype = block.bias.dtype if block.final else jnp.float32
            zeros = (jnp.zeros(x.shape, dtype) for x in (block.q, block.k, block.v))
            return Gradients(*zeros, jnp.full_like(block.bias, rows * 1.0038, dtype))

    features = {name for name in (Feature.BFLOAT16, Feature.BIAS, Feature.GRADIENTS)}
    q = jnp.ones((3, 200, 2, 1, 4), jnp.bfloat16)
    bias = jnp.zeros((1, 1, 2, 2), jnp.bfloat16)

    def loss(bias: Any, q: Any) -> Any:
        return ring_attention(q, q, q, None, bias, backend="adder").astype(jnp.float32).sum()

    adder = Backend(name="adder", api=1, platforms=("cpu",), kernel="a:b", features=features)
    with discovery.registered(adder, Adder()):
        got, dq = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))(bias, q)
    assert got.dtype == dq.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), 201)


def test_examples_with_different_head_indices_run_one_by_one():
    x = inputs()

    def sharded(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q, k, v, head_axis_name="heads", dropout_prob=0.5, dropout_seed=1)

    split = [jnp.moveaxis(x[name][0].reshape(B, T, 2, N // 2, H), 2, 0) for name in "qkv"]
    got = jax.vmap(sharded, axis_name="heads")(*split)
    whole = ring_attention(x["q"][0], x["k"][0], x["v"][0], dropout_prob=0.5, dropout_seed=1)
    np.testing.assert_allclose(jnp.moveaxis(got, 0, 2).reshape(B, T, N, H), whole, atol=2e-5)
