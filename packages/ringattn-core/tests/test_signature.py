# SPDX-License-Identifier: Apache-2.0
"""Signatures are written out; that of one shard is ejkernel's plus keyword options, and no ring function lacks it."""

import functools
import inspect
from typing import Any

import jax
import numpy as np
import pytest
from ringattn_core import (
    Backend,
    Feature,
    RingKernel,
    decode_attention,
    per_shard,
    prefill_attention,
    ring_attention,
)
from ringattn_core.backends import discovery
from ringattn_core.contract.call import DEFAULTS
from ringattn_core.contract.signature import mismatch
from ringattn_core.errors import BackendLoadError, UnsupportedFeatureError
from ringattn_testing.rings import query_key_value

EJKERNEL = (
    "query, key, value, q_segment_ids, kv_segment_ids, softmax_aux, bias, mask_builder, sliding_window, chunk_size, "
    "causal, logits_soft_cap, softmax_scale, axis_name, fwd_params, bwd_params, fused_backward"
)


def arrays() -> list[jax.Array]:
    return query_key_value(1, 8, 2, 2, 4)


OF_CORE = {"strategy", "max_distance", "balance", "return_max_logits", "kv_range", "selected", "selected_size"}
"""The options of one shard that a backend's own ring function does not get."""
SHARD = list(inspect.signature(RingKernel.__call__).parameters.values())[1:]


def test_names_and_order_up_to_fused_backward_never_change():
    positional = [p for p in SHARD if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert ", ".join(p.name for p in positional) == EJKERNEL
    given = {p.name: p.default for p in positional[3:] if p.default is not None}
    assert given == {"causal": False, "fused_backward": False}


def test_the_function_of_a_shard_is_a_ring_kernel():
    assert mismatch(per_shard("xla")) is None
    shown = [(p.name, p.kind, p.default) for p in inspect.signature(per_shard("xla")).parameters.values()]
    assert [x for x in shown if x[0] in {p.name for p in SHARD}] == [(p.name, p.kind, p.default) for p in SHARD]
    assert {name for name, *_ in shown} - {p.name for p in SHARD} == OF_CORE


@pytest.mark.parametrize("function", [ring_attention, decode_attention, prefill_attention, per_shard("xla")])
def test_an_option_that_is_left_out_is_off_in_the_canonical_call(function: Any):
    assert all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    off = DEFAULTS
    of_operands = ("query", "key", "value", "softmax_scale", "fwd_params", "bwd_params", "max_distance")
    given = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name not in of_operands}
    shared = given.keys() & off.keys()
    assert "sliding_window" in shared and {name: given[name] for name in shared} == {name: off[name] for name in shared}


def whole() -> Backend:
    return Backend(name="whole", api=1, platforms=("cpu",), features={Feature.FLOAT32}, ring="somewhere:else")


def test_a_backend_may_own_its_ring_and_gets_the_call_in_canonical_form():
    seen: dict[str, Any] = {}

    def ring(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.update(options)
        return query

    q, k, v = arrays()
    with discovery.registered(whole(), ring):
        assert (ring_attention(q, k, v, backend="whole") == q).all()
    assert set(seen) == {p.name for p in SHARD} - {"query", "key", "value"}
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
            call = functools.partial(ring_attention, backend="whole", **options)
            held = jax.grad(lambda q, call=call: (q * jax.lax.stop_gradient(call(q, k, v))).sum())
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
