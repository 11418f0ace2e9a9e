# SPDX-License-Identifier: Apache-2.0
"""Padding of finite numbers affects no result, nor does its cotangent; NaN reaches every row that sees it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import Backend, Feature, ring_attention
from ringattn_core.backends import discovery
from ringattn_core.errors import NoBackendError, UnsupportedFeatureError
from ringattn_testing.rings import close, graded, mesh_of, query_key_value
from ringattn_xla.block import XlaKernel

LENGTH, BAD = 12, 5


def arrays() -> list[jax.Array]:
    return query_key_value(1, LENGTH, 2, 2, 4)


def tokens_with_nan(x: jax.Array) -> set[int]:
    return set(np.flatnonzero(np.isnan(np.asarray(x)).any((0, 2, 3))))


def test_a_ring_function_gets_no_cotangent_of_padding():
    def ring(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Any:
        out = query + key + value
        return out, out[..., 0].swapaxes(1, 2)

    features = frozenset((Feature.FLOAT32, Feature.GRADIENTS, Feature.SEGMENT_IDS, Feature.RETURN_LSE))
    ids = jnp.zeros((1, LENGTH), jnp.int32).at[0, BAD].set(-1)
    with discovery.registered(Backend("sum", 1, ("cpu",), features, ring="nowhere:ring"), ring):
        call = functools.partial(ring_attention, q_segment_ids=ids, return_lse=True, backend="sum")
        (out, lse), pull = jax.vjp(call, *arrays())
        gradients = pull((jnp.ones_like(out).at[0, BAD].set(jnp.nan), jnp.ones_like(lse).at[..., BAD].set(jnp.nan)))
        assert all((gradient[0, BAD] == 0).all() and jnp.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_lengths_that_the_ring_does_not_divide_are_right_with_every_strategy(strategy: str) -> None:
    operands = query_key_value(1, 13, 4, 4)
    ring: dict[str, Any] = {"mesh": mesh_of(AxisType.Explicit, sp=4), "axis_name": "sp", "strategy": strategy}
    got = graded(functools.partial(ring_attention, causal=True, **ring), *operands)
    close(got, graded(functools.partial(ring_attention, causal=True), *operands))


def test_tokens_that_an_explicit_axis_beside_the_ring_splits_are_padded_too() -> None:
    """JAX does not pad them, because that axis does not divide the padded length."""
    mesh, operands = mesh_of(AxisType.Explicit, beside=3, sp=2), query_key_value(1, 9, 2, 2)
    ring: dict[str, Any] = {"mesh": mesh, "axis_name": "sp", "batch_axis_name": (), "head_axis_name": ()}
    placed = jax.device_put(operands, NamedSharding(mesh, P(None, "beside")))
    close(graded(functools.partial(ring_attention, **ring), *placed), graded(ring_attention, *operands))


@pytest.mark.parametrize("ranks", [1, 4])
def test_nan_in_a_cotangent_reaches_all_that_its_row_sees(ranks: int):
    ring: dict[str, Any] = {"mesh": mesh_of(sp=ranks), "axis_name": "sp"}
    out, pull = jax.vjp(jax.jit(lambda *x: ring_attention(*x, causal=True, sliding_window=3, **ring)), *arrays())
    dq, dk, dv = pull(jnp.ones_like(out).at[0, BAD, 1, 2].set(jnp.nan))
    assert {BAD} <= tokens_with_nan(dq)
    assert set(range(BAD - 3, BAD + 1)) <= tokens_with_nan(dk) & tokens_with_nan(dv)


def test_nan_in_a_bias_reaches_rows_where_it_is_visible():
    bias = jnp.zeros((1, 1, LENGTH, LENGTH)).at[0, 0, BAD, BAD - 1].set(jnp.nan).at[0, 0, 2, 7].set(jnp.nan)
    assert tokens_with_nan(ring_attention(*arrays(), None, bias, causal=True)) == {BAD}


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_sink_that_is_nan_or_infinite_reaches_every_row_of_its_head(value: float):
    out, lse = ring_attention(*arrays(), jnp.array([0.0, value]), return_lse=True)
    assert jnp.isfinite(out[:, :, 0]).all() and jnp.isnan(out[:, :, 1]).all() and jnp.isnan(lse[:, 1]).all()


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(("backend", "kind"), [("thin", UnsupportedFeatureError), (None, NoBackendError)])
def test_a_backend_without_ids_is_refused_for_padding_in_the_words_of_the_caller(backend: Any, kind: Any) -> None:
    thin = Backend("thin", 1, ("cpu",), {*Feature} - {Feature.SEGMENT_IDS}, kernel="a:b")
    with discovery.registered(thin, XlaKernel()), pytest.raises(kind, match="does not support SEGMENT_IDS") as caught:
        ring_attention(*[jnp.ones((1, 13, 2, 8))] * 3, mesh=mesh_of(sp=4), axis_name="sp", backend=backend)
    assert "Pass lengths that the ring divides, not 13." in caught.value.__notes__[0]
