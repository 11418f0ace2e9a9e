# SPDX-License-Identifier: Apache-2.0
"""`return_max_logits` gives the largest score of each head over ring and batch, and changes nothing else."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from ringattn_conformance import oracle
from ringattn_core import Backend, Feature, Partial, from_flash, remat_policy, ring_attention
from ringattn_core.backends.discovery import registered
from ringattn_core.contract.merge import merge
from ringattn_core.errors import BackendLoadError, InputError, KernelError
from ringattn_testing.rings import close, graded, mesh_of, query_key_value

B, T, N, K = 2, 48, 4, 2
QUERY, KEY, VALUE = query_key_value(B, T, N, K)
SINKS = jnp.full((N, 1), 9.0)  # larger than every score
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


PLACES: list[tuple[AxisType, dict[str, int], str | tuple[str, ...], dict[str, Any]]] = [
    (EXPLICIT, {"sp": 2, "tp": 2}, "sp", {"layout": "zigzag", "strategy": "all_gather"}),
    (EXPLICIT, {"dp": 2, "outer": 2, "inner": 2}, ("outer", "inner"), {"strategy": "ulysses"}),
    (AUTO, {"sp": 4, "tp": 2}, "sp", {"balance": "zigzag"}),
    (EXPLICIT, {"sp": 8}, "sp", {"sliding_window": (9, 0)}),
]


@pytest.mark.parametrize(("kind", "axes", "axis", "options"), PLACES)
def test_it_is_the_oracle_s_and_has_no_gradient(kind: AxisType, axes: Any, axis: Any, options: Any) -> None:
    """The loss weighs `max_logits`, and its gradients are those of the output alone."""
    options = options | {"causal": True, "logits_soft_cap": 3.0, "mesh": mesh_of(kind, **axes), "axis_name": axis}
    attend = functools.partial(ring_attention, softmax_aux=SINKS, **options)
    (out, found), gradients = graded(functools.partial(attend, return_max_logits=True), QUERY, KEY, VALUE)
    close((out, gradients), graded(attend, QUERY, KEY, VALUE), 1e-6)
    assert found.dtype == jnp.float32
    order = oracle.order(options.get("layout", "contiguous"), 2, T)
    query, key, value = (np.asarray(x)[:, np.argsort(order)] for x in (QUERY, KEY, VALUE))
    problem = oracle.Problem(query, key, value, causal=True, window=options.get("sliding_window"), soft_cap=3.0)
    close(found, oracle.attend(problem).max_logits, 1e-5)


def test_padding_of_uneven_lengths_does_not_count_and_a_head_without_keys_has_minus_infinity() -> None:
    """Scores are about -9, and a padding query of zeros would have the score 0."""
    bias, seen = jnp.full((1, 1, 1, T), -9.0), jnp.ones((1, N, 5, T), bool).at[:, 1].set(False)
    options: dict[str, Any] = {"mesh": mesh_of(sp=4), "axis_name": "sp", "return_max_logits": True}
    _, found = ring_attention(QUERY[:, :5], KEY, VALUE, None, bias, attention_mask=seen, **options)
    query, key, value = (np.asarray(x) for x in (QUERY[:, :5], KEY, VALUE))
    wanted = oracle.attend(oracle.Problem(query, key, value, bias=np.asarray(bias), seen=np.asarray(seen))).max_logits
    assert np.isneginf(found[1]) and (np.delete(found, 1) < -4).all()
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_each_vmapped_example_has_its_own() -> None:
    def attend(query: jax.Array) -> Any:
        return ring_attention(query, KEY, VALUE, causal=True, return_max_logits=True)[1]

    queries = jnp.stack([QUERY, -2 * QUERY])
    np.testing.assert_allclose(jax.vmap(attend)(queries), [*map(attend, queries)], atol=1e-5)


def test_it_costs_one_all_reduce_and_a_checkpointed_layer_sends_nothing_again() -> None:
    options: dict[str, Any] = {"causal": True, "mesh": mesh_of(sp=4), "axis_name": "sp"}
    policy = remat_policy()

    def collectives(**more: Any) -> dict[str, int]:
        def loss(x: jax.Array) -> Any:
            layer = jax.checkpoint(lambda x: ring_attention(x, KEY, VALUE, **options, **more), policy=policy)
            out, *rest = jax.tree.leaves(layer(x))
            return (out**2).sum(), rest

        text = jax.jit(jax.grad(loss, has_aux=True)).lower(QUERY).compile().as_text() or ""
        return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in ("collective-permute", "all-reduce")}

    plain, asked = collectives(), collectives(return_max_logits=True)
    assert asked == plain | {"all-reduce": plain["all-reduce"] + 1}


def test_partial_results_merge_by_maximum() -> None:
    out, lse = jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 1, 2))
    a, b = (Partial(out, lse, jnp.asarray([[x]])) for x in ([1.0, -jnp.inf], [-2.0, 3.0]))
    np.testing.assert_array_equal(merge(a, b).max_logits, [[[1.0, 3.0]]])
    assert merge(a, Partial(out, lse)).max_logits is None


class Forgetful:
    def forward(self, block: Any, partial: Any) -> Partial:
        return Partial(block.q, jnp.zeros((B, N, T)))

    def backward(self, *_: Any) -> Any: ...


@pytest.mark.parametrize(
    ("door", "implementation", "error", "message"),
    [
        ("ring", lambda **_: None, InputError, "True needs a kernel of one block, but backend 'mine'"),
        ("kernel", from_flash(len, len), BackendLoadError, "declares MAX_LOGITS, which its kernel cannot have"),
        ("kernel", Forgetful(), KernelError, "returned max_logits = None"),
    ],
)
def test_only_a_block_kernel_that_returns_it_has_it(door: str, implementation: Any, error: Any, message: str) -> None:
    features = {Feature.FLOAT32, Feature.GROUPED_HEADS, Feature.MAX_LOGITS}
    backend = Backend("mine", 1, ("cpu",), features, **{door: "nowhere:KERNEL"})
    with registered(backend, implementation), pytest.raises(error, match=message):
        ring_attention(QUERY, KEY, VALUE, return_max_logits=True, backend="mine")
