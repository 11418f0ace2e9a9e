# SPDX-License-Identifier: Apache-2.0
"""Promises of the Equinox module: the parameters and results of Equinox's own, over a ring and in batches."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_adapters.equinox import RingMultiheadAttention
from ringattn_core import MaskInfo, errors, from_layout, to_layout
from ringattn_testing.agreement import agree, mesh

B, T, C, N = 2, 16, 32, 4
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (B, T, C))
CAUSAL = jnp.tril(jnp.ones((T, T), bool))
SIZES = {"key_size": 12, "value_size": 20, "output_size": 24, "qk_size": 5, "vo_size": 7}
BIASES = {"use_query_bias": True, "use_key_bias": True, "use_value_bias": True, "use_output_bias": True}


def gradients(module: Any, *inputs: jax.Array, **call: Any) -> Any:
    """The output of a module, and the gradients of its parameters and inputs."""
    parameters, structure = eqx.partition(module, eqx.is_inexact_array)

    def loss(parameters: Any, inputs: Any) -> Any:
        out = eqx.combine(parameters, structure)(*inputs, **call)
        return jnp.sum(jnp.sin(out)), out

    (_, out), found = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters, inputs)
    return jax.tree.leaves((out, found))


@pytest.mark.parametrize("sizes", [{}, SIZES | BIASES], ids=["same", "sizes and biases"])
def test_the_same_key_gives_the_parameters_and_the_results_of_equinox(sizes: dict[str, Any]):
    ours, theirs = (kind(N, C, **sizes, key=KEY) for kind in (RingMultiheadAttention, eqx.nn.MultiheadAttention))
    parameters = [
        {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(eqx.filter(m, eqx.is_array))}
        for m in (ours, theirs)
    ]
    assert parameters[0].keys() == parameters[1].keys()
    for name, x in parameters[0].items():
        np.testing.assert_array_equal(x, parameters[1][name])
    key_ = jax.random.normal(jax.random.key(2), (24, sizes.get("key_size", C)))
    value = jax.random.normal(jax.random.key(3), (24, sizes.get("value_size", C)))
    agree(gradients(ours, X[0], key_, value), gradients(theirs, X[0], key_, value))


@pytest.mark.parametrize("mask", [CAUSAL, jnp.stack([CAUSAL, CAUSAL.T] * 2)], ids=["all heads", "by head"])
def test_masks_are_those_of_equinox(mask: jax.Array):
    ours, theirs = (kind(N, C, key=KEY) for kind in (RingMultiheadAttention, eqx.nn.MultiheadAttention))
    agree(gradients(ours, X[0], X[0], X[0], mask=mask), gradients(theirs, X[0], X[0], X[0], mask=mask))


def test_spans_are_ranges_of_a_call():
    ours, theirs = (kind(N, C, key=KEY) for kind in (RingMultiheadAttention, eqx.nn.MultiheadAttention))
    image = (np.arange(T) >= 5) & (np.arange(T) < 9)
    spans = MaskInfo.from_spans(np.where(image, 0, -1)[None]).kv_range
    mask = CAUSAL | (image[:, None] & image)
    agree(gradients(ours, X[0], X[0], X[0], kv_range=spans), gradients(theirs, X[0], X[0], X[0], mask=mask))


def test_a_batch_gives_the_result_of_each_example():
    module = RingMultiheadAttention(N, C, key=KEY, causal=True)
    together = gradients(module, X, X, X)
    theirs = eqx.nn.MultiheadAttention(N, C, key=KEY)
    one = jnp.stack([theirs(x, x, x, CAUSAL) for x in X])
    np.testing.assert_allclose(together[0], one, atol=2e-5)
    np.testing.assert_allclose(jax.vmap(module)(X, X, X), one, atol=2e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_mesh_gives_what_one_device_gives_in_every_layout(layout: str):
    options = {"num_key_heads": 2, "causal": True, "key": KEY}
    spread = RingMultiheadAttention(N, C, **options, mesh=mesh(), axis_name="sp", layout=layout)
    x = to_layout(X, layout, 4)
    got, want = gradients(spread, x, x, x), gradients(RingMultiheadAttention(N, C, **options), X, X, X)
    places = [0, *range(-3, 0)]  # the output and the gradients of the inputs are in layout order
    for place in places:
        got[place] = from_layout(got[place], layout, 4)
    agree(got, want)


def test_fewer_key_heads_give_the_result_of_repeated_key_heads():
    few = RingMultiheadAttention(N, C, num_key_heads=2, key=KEY)
    many = eqx.nn.MultiheadAttention(N, C, key=KEY)

    def repeated(weight: jax.Array) -> jax.Array:
        return jnp.repeat(weight.reshape(2, C // N, C), 2, 0).reshape(C, C)

    many = eqx.tree_at(
        lambda m: (m.query_proj, m.key_proj.weight, m.value_proj.weight, m.output_proj),
        many,
        (few.query_proj, repeated(few.key_proj.weight), repeated(few.value_proj.weight), few.output_proj),
    )
    np.testing.assert_allclose(few(X[0], X[0], X[0]), many(X[0], X[0], X[0]), atol=2e-5)


@pytest.mark.parametrize("batched", [True, False])
def test_process_heads_changes_query_key_and_value(batched: bool):
    def halved(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
        return query / 2, key, value

    x = X if batched else X[0]
    plain = RingMultiheadAttention(N, C, key=KEY, softmax_scale=0.5 * (C // N) ** -0.5)
    got = RingMultiheadAttention(N, C, key=KEY)(x, x, x, process_heads=halved)
    np.testing.assert_allclose(got, plain(x, x, x), atol=2e-5)


def test_options_that_are_arrays_are_passed_to_the_call():
    module = RingMultiheadAttention(N, C, key=KEY)
    ids = jnp.arange(T, dtype=jnp.int32) // 6
    same = ids[:, None] == ids[None, :]
    want = module(X[0], X[0], X[0], same)
    np.testing.assert_allclose(module(X[0], X[0], X[0], q_segment_ids=ids), want, atol=2e-5)
    many = module(X, X, X, q_segment_ids=jnp.stack([ids] * B))
    np.testing.assert_allclose(many[0], want, atol=2e-5)
    sunk = module(X[0], X[0], X[0], softmax_aux=jnp.full((N,), 50.0))
    assert np.max(np.abs(sunk)) < 1e-6


class TestDropout:
    def test_the_key_decides_it_on_one_device_and_on_a_mesh(self):
        options = {"dropout_p": 0.5, "key": KEY}
        module = RingMultiheadAttention(N, C, **options)
        spread = RingMultiheadAttention(N, C, **options, mesh=mesh(), axis_name="sp")
        one, other = (module(X, X, X, key=jax.random.key(seed)) for seed in (1, 2))
        np.testing.assert_allclose(spread(X, X, X, key=jax.random.key(1)), one, atol=2e-5)
        assert np.max(np.abs(one - other)) > 1e-2

    def test_inference_drops_nothing(self):
        plain, dropping = (RingMultiheadAttention(N, C, dropout_p=p, key=KEY) for p in (0.0, 0.5))
        np.testing.assert_array_equal(dropping(X, X, X, inference=True), plain(X, X, X))
        np.testing.assert_array_equal(eqx.nn.inference_mode(dropping)(X, X, X), plain(X, X, X))


REFUSED = {
    "a number for a key": (lambda: RingMultiheadAttention(N, C, key=3), "key: is not one random key"),
    "heads that are text": (lambda: RingMultiheadAttention("text", C, key=KEY), "num_heads: got 'text'. It needs"),
    "other axes": (lambda: RingMultiheadAttention(N, C, key=KEY)(X, X[0], X[0]), "query, key_ and value: have shapes"),
    "another size": (lambda: RingMultiheadAttention(N, C, key=KEY)(X, X[..., :3], X), "key_: has shape .2, 16, 3."),
    "another mask": (lambda: RingMultiheadAttention(N, C, key=KEY)(X, X, X, CAUSAL[:3]), "^mask: has shape"),
    "heads that cannot share keys": (
        lambda: RingMultiheadAttention(N, C, num_key_heads=3, key=KEY), "num_key_heads: got 3 for 4 heads"
    ),
    "a setting without a hash": (lambda: RingMultiheadAttention(N, C, key=KEY, cfg={}), "cfg: is a dict, which cannot"),
    "an array as a setting": (
        lambda: RingMultiheadAttention(N, C, key=KEY, q_segment_ids=jnp.zeros((1, T), int)), "q_segment_ids: is no"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_named(name: str):
    call, message = REFUSED[name]
    with pytest.raises(errors.InputError, match=message):
        call()


def test_without_a_rate_the_switch_of_dropout_may_be_traced():
    layer = RingMultiheadAttention(N, C, dropout_p=0, key=KEY)
    eqx.filter_jit(lambda off: layer(X, X, X, key=KEY, inference=off))(jnp.bool_(True))


def test_modules_with_equal_settings_have_equal_tree_structures():
    """So that a program compiled for one module serves the other."""
    one, other = (RingMultiheadAttention(N, C, key=KEY, causal=True, mesh=mesh(), axis_name="sp") for _ in range(2))
    assert jax.tree.structure(one) == jax.tree.structure(other)
