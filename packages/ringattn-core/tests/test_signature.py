# SPDX-License-Identifier: Apache-2.0
"""The per-shard signature is ejkernel's plus keyword options, and a function without it is refused."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import Backend, Feature, Support, per_shard, ring_attention
from ringattn_core.backends import discovery
from ringattn_core.call.validation import validated
from ringattn_core.contract import call
from ringattn_core.contract.signature import PARAMETERS, mismatch
from ringattn_core.errors import BackendLoadError, UnsupportedFeatureError

EJKERNEL = (
    "query, key, value, q_segment_ids, kv_segment_ids, softmax_aux, bias, mask_builder, sliding_window, chunk_size, "
    "causal, logits_soft_cap, softmax_scale, axis_name, fwd_params, bwd_params, fused_backward"
)


def arrays() -> list[jax.Array]:
    return [jax.random.normal(key, (1, 8, 2, 4)) for key in jax.random.split(jax.random.key(0), 3)]


def test_names_and_order_up_to_fused_backward_never_change():
    positional = [p for p in PARAMETERS if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert ", ".join(p.name for p in positional) == EJKERNEL
    assert {p.name: p.default for p in positional[3:] if p.default is not None} == {
        "causal": False,
        "fused_backward": False,
    }


def test_a_backend_function_shows_the_whole_signature_with_its_defaults():
    assert mismatch(per_shard("xla")) is None
    assert tuple(inspect.signature(per_shard("xla")).parameters) == tuple(p.name for p in PARAMETERS)


def test_a_canonical_call_is_made_of_parameters_of_the_signature():
    names = {p.name for p in PARAMETERS}
    assert set(validated(*arrays()).options()) == names - {"q_position_ids", "kv_position_ids", "strategy"}


def test_the_positions_of_ejkernel_are_other_names_for_ours():
    q, k, v = arrays()
    positions = jnp.array([0, 1, 2, 0, 1, 2, 3, 4])
    a = per_shard("xla")(q, k, v, causal=True, q_position_ids=positions, kv_position_ids=positions)
    b = ring_attention(q, k, v, causal=True, q_positions=positions, kv_positions=positions)
    assert (a == b).all()


def test_a_call_written_for_ejkernel_runs_by_position_and_by_keyword():
    q, k, v = arrays()
    by_position = per_shard("xla")(q, k, v, None, None, None, None, None, 3, None, True)
    by_keyword = per_shard("xla")(query=q, key=k, value=v, sliding_window=3, causal=True, fwd_params={"q_blocksize": 4})
    np.testing.assert_allclose(by_position, by_keyword, atol=1e-6)
    np.testing.assert_allclose(by_position, ring_attention(q, k, v, sliding_window=3, causal=True), atol=1e-6)


def whole() -> Backend:
    return Backend(
        name="whole", api=1, platforms=("cpu",), features={Feature.FLOAT32: Support.FULL}, ring="somewhere:else"
    )


def test_a_backend_may_own_its_ring_and_gets_the_call_in_canonical_form():
    seen: dict[str, Any] = {}

    def ring(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.update(options)
        return query

    q, k, v = arrays()
    with discovery.registered(whole(), ring):
        assert (ring_attention(q, k, v, backend="whole") == q).all()
    of_core = {"query", "key", "value", "strategy", "bias_dtype"}
    assert set(seen) == {f.name for f in call.dataclasses.fields(call.Call)} - of_core
    assert seen["softmax_scale"] == 0.5 and seen["axis_name"] is None


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_a_backend_without_gradients_refuses_to_be_differentiated(transform: Any):
    q, k, v = arrays()
    with (
        discovery.registered(whole(), lambda query, key, value, **_: query),
        pytest.raises(UnsupportedFeatureError, match=r"'whole' does not support GRADIENTS \(not declared\)"),
    ):
        transform(lambda q: ring_attention(q, k, v, backend="whole").sum())(q)


def test_what_holds_the_result_of_a_backend_without_gradients_fixed_may_be_differentiated():
    q, k, v = arrays()
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("sp",))
    with discovery.registered(whole(), lambda query, key, value, **_: query):
        for options in ({}, {"mesh": mesh, "axis_name": "sp"}):
            held = jax.grad(
                lambda q, options=options: (
                    q * jax.lax.stop_gradient(ring_attention(q, k, v, backend="whole", **options))
                ).sum()
            )
            np.testing.assert_array_equal(held(q), q)
            np.testing.assert_array_equal(jax.jit(held)(q), q)


@pytest.mark.parametrize(
    "ring, reason",
    [
        (lambda query, key, value: query, "needs the parameter 'q_segment_ids', or \\*\\*options"),
        (lambda query, key, value, causal=True, **_: query, "'causal' must default to False, not to True"),
    ],
)
def test_a_ring_of_another_signature_does_not_load(ring: Any, reason: str):
    with discovery.registered(whole(), ring), pytest.raises(BackendLoadError, match=reason):
        ring_attention(*arrays(), backend="whole")
