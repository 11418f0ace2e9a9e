# SPDX-License-Identifier: Apache-2.0
"""A ring begins from its attention sinks: they count once, in every row, and change nothing else."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from ringattn_conformance import oracle
from ringattn_core import Backend, Feature, Gradients, Partial, merging, ring_attention
from ringattn_core.backends.discovery import registered
from ringattn_testing.rings import close, drawn, graded, mesh_of
from ringattn_xla.block import XlaKernel

B, T, N, K, H = 2, 48, 4, 2, 8
SINKS = jnp.asarray([[0.5, -1.0], [-jnp.inf, 2.0], [-jnp.inf, -jnp.inf], [40.0, -40.0]])
QUERY, KEY, VALUE, DOUT = drawn((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
DLSE = jnp.sin(jnp.arange(B * N * T, dtype=jnp.float32)).reshape(B, N, T)
SEGMENTS = np.zeros((B, T), np.int32)
SEGMENTS[0, 20:], SEGMENTS[1, 12:24], SEGMENTS[1, 40:] = 1, -1, 3
"""In row 1, tokens 12 to 23 see nothing: all tokens of the second of four ranks, in contiguous order."""
OPTIONS: dict[str, Any] = {"causal": True, "return_lse": True, "return_max_logits": True}


class Merging:
    """A kernel that knows nothing of partial results."""

    def __init__(self) -> None:
        self.finals: set[bool] = set()

    def of_block(self, block: Any) -> Partial:
        self.finals.add(block.final)
        return XlaKernel().forward(block, None)

    def forward(self, block: Any, partial: Partial | None) -> Partial:
        return merging(self.of_block)(block, partial)

    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Gradients:
        return XlaKernel().backward(block, dout, lse, delta, dq)


MERGING = Backend("merging", 1, ("cpu",), {*Feature}, kernel="nowhere:KERNEL")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PLACES: dict[str, tuple[AxisType, dict[str, int], dict[str, Any]]] = {
    "one device": (AUTO, {"sp": 1}, {}),
    "2, zigzag": (EXPLICIT, {"sp": 2}, {"layout": "zigzag"}),
    "3, striped": (AUTO, {"sp": 3}, {"layout": "striped"}),
    "4, contiguous": (EXPLICIT, {"sp": 4}, {}),
    "8, zigzag": (AUTO, {"sp": 8}, {"layout": "zigzag"}),
    "a loop in a loop": (AUTO, {"outer": 2, "inner": 2}, {}),
    "all_gather": (AUTO, {"sp": 4}, {"strategy": "all_gather"}),
    "ulysses": (EXPLICIT, {"sp": 2}, {"strategy": "ulysses"}),
}


@pytest.mark.parametrize("place", PLACES)
def test_results_and_gradients_are_those_of_the_oracle_also_where_a_rank_sees_nothing(place: str) -> None:
    kind, axes, options = PLACES[place]
    ranks, layout = int(np.prod([*axes.values()])), options.get("layout", "contiguous")
    order = oracle.order(layout, ranks, T)
    ids = jnp.asarray(SEGMENTS[:, order])

    def attend(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        ring = OPTIONS | options | {"mesh": mesh_of(kind, **axes), "axis_name": (*axes,), "q_segment_ids": ids}
        (out, lse, most), pull = jax.vjp(lambda *x: ring_attention(*x, **ring), query, key, value, sinks)
        return (out, lse, most), pull((DOUT[:, order], DLSE[:, :, order], jnp.ones_like(most)))

    found = jax.jit(attend)(*(x[:, order] for x in (QUERY, KEY, VALUE)), SINKS)
    (out, lse, most), (dq, dk, dv, dsinks) = jax.tree.map(np.asarray, found)
    arrays = [np.asarray(x) for x in (QUERY, KEY, VALUE)]
    problem = oracle.Problem(*arrays, causal=True, q_segments=SEGMENTS, kv_segments=SEGMENTS, sinks=np.asarray(SINKS))
    wanted = oracle.attend(problem, np.asarray(DOUT), np.asarray(DLSE))
    back = np.argsort(order)
    close((out[:, back], lse[:, :, back], most), (wanted.out, wanted.lse, wanted.max_logits))
    of_tokens = {"dq": dq[:, back], "dk": dk[:, back], "dv": dv[:, back]}
    close(of_tokens | {"dsinks": dsinks}, {name: wanted.gradients[name] for name in (*of_tokens, "dsinks")}, 5e-5)
    unseen = np.flatnonzero(SEGMENTS[1, order] < 0)
    assert not out[1, unseen].any()
    close(lse[1, :, unseen], np.broadcast_to(jax.nn.logsumexp(SINKS, 1), (len(unseen), N)), 1e-6)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_kernel_of_merging_begins_from_them_too(ranks: int) -> None:
    ring = OPTIONS | {"mesh": mesh_of(sp=ranks), "axis_name": "sp"}
    kernel = Merging()
    with registered(MERGING, kernel):
        got = graded(lambda *x: ring_attention(*x, **ring, backend="merging"), QUERY, KEY, VALUE, SINKS)
    close(got, graded(lambda *x: ring_attention(*x, **ring, backend="xla"), QUERY, KEY, VALUE, SINKS))
    assert kernel.finals == {False}, "what is merged must not be rounded first"


@pytest.mark.parametrize("ranks", [1, 2])
def test_sinks_of_minus_infinity_change_no_bit(ranks: int) -> None:
    ring = OPTIONS | {"mesh": mesh_of(sp=ranks), "axis_name": "sp", "q_segment_ids": jnp.asarray(SEGMENTS)}
    with_sinks = graded(lambda *x: ring_attention(*x, jnp.full(N, -jnp.inf), **ring), QUERY, KEY, VALUE)
    without = graded(lambda *x: ring_attention(*x, **ring), QUERY, KEY, VALUE)
    jax.tree.map(np.testing.assert_array_equal, with_sinks, without)


@pytest.mark.parametrize("large", [1e4, -1e4])
def test_sinks_of_any_size_are_safe(large: float) -> None:
    sinks = jnp.full(N, large)
    ring: dict[str, Any] = {"mesh": mesh_of(sp=2), "axis_name": "sp", "q_segment_ids": jnp.asarray(SEGMENTS)}
    out, lse = jax.jit(lambda *x: ring_attention(*x, sinks, return_lse=True, **ring))(QUERY, KEY, VALUE)
    arrays = [np.asarray(x) for x in (QUERY, KEY, VALUE)]
    problem = oracle.Problem(*arrays, q_segments=SEGMENTS, kv_segments=SEGMENTS, sinks=np.asarray(sinks))
    wanted = oracle.attend(problem)
    close(out, wanted.out)
    np.testing.assert_allclose(lse, wanted.lse, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_sink_that_is_no_number_is_not_hidden_by_the_hops_after_it_nor_where_no_key_is_seen(value: float) -> None:
    ring: dict[str, Any] = {"mesh": mesh_of(sp=4), "axis_name": "sp", "q_segment_ids": jnp.asarray(SEGMENTS)}
    sinks = jnp.asarray([0.0, value, 0.0, 0.0])
    out, lse = ring_attention(QUERY, KEY, VALUE, sinks, return_lse=True, **ring)
    assert np.isnan(out[:, :, 1]).all() and np.isnan(lse[:, 1]).all()
    assert np.isfinite(np.delete(out, 1, 2)).all() and np.isfinite(np.delete(lse, 1, 1)).all()


@pytest.mark.parametrize("shared", [True, False])
def test_each_vmapped_example_has_its_own(shared: bool) -> None:
    """`shared`: all examples have the same queries and keys, and only the sinks differ."""
    examples = [[QUERY, KEY, VALUE, SINKS], [QUERY, KEY, VALUE, SINKS + 1.0]]
    if not shared:
        examples[1] = [VALUE.repeat(2, 2), QUERY[:, :, :K], KEY, SINKS + 1.0]

    def attend(*x: Any) -> Any:
        return graded(lambda *x: ring_attention(*x, **OPTIONS, mesh=mesh_of(sp=2), axis_name="sp"), *x)

    stacked = [jnp.stack(x) for x in zip(*examples, strict=True)]
    axes = (None, None, None, 0) if shared else (0, 0, 0, 0)
    got = jax.jit(jax.vmap(attend, axes))(*(x if a == 0 else x[0] for x, a in zip(stacked, axes, strict=True)))
    each = [attend(*x) for x in examples]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_half_precision_is_rounded_once_where_one_block_has_all_keys() -> None:
    """A kernel of one block may write the output in the dtype of the queries."""

    class Final(XlaKernel):
        def forward(self, block: Any, partial: Partial | None) -> Partial:
            assert block.final and partial is not None and partial.out is None
            done = super().forward(block, partial)
            assert done.out is not None
            return dataclasses.replace(done, out=done.out.astype(block.q.dtype))

    x = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    with registered(MERGING, Final()):
        out = ring_attention(*x, SINKS, causal=True, backend="merging")
    whole = ring_attention(*(x.astype(jnp.float32) for x in x), SINKS, causal=True)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), whole, rtol=0, atol=2e-2)
