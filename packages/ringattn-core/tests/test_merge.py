# SPDX-License-Identifier: Apache-2.0
"""Promises of merging: it is a commutative monoid. That parts merge to all of attention is compared by the suite."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from ringattn_core import ring_attention, to_layout
from ringattn_core.contract.merge import merge, merged_over
from ringattn_core.contract.protocol import Partial
from ringattn_core.errors import InputError
from ringattn_testing.rings import close, differentiated, graded, in_order_of, mesh_of, query_key_value

B, T, N, H = 2, 3, 2, 4
INF = np.float32(np.inf)
LSE = st.one_of(st.just(-INF), st.floats(-1e4, 1e4, width=32, allow_subnormal=False))


def partial(lse: Any, seed: int = 0) -> Partial:
    """A random partial result with this `lse`; `out` is 0 where `lse` is -inf."""
    lse = np.broadcast_to(np.float32(lse), (B, N, T))
    out = np.random.default_rng(seed).standard_normal((B, T, N, H)).astype(np.float32)
    return Partial(jnp.asarray(out * np.isfinite(lse).swapaxes(1, 2)[..., None]), jnp.asarray(lse))


def identity() -> Partial:
    return Partial(jnp.zeros((B, T, N, H), jnp.float32), jnp.full((B, N, T), -INF))


def assert_same(a: Partial, b: Partial, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(a.lse, b.lse, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(a.out, b.out, rtol=0, atol=tolerance * 4)


@pytest.mark.parametrize(
    ("ranks", "layout", "kind"),
    [
        (1, "contiguous", AxisType.Auto),
        (2, "zigzag", AxisType.Explicit),
        (3, "striped", AxisType.Auto),
        (4, "contiguous", AxisType.Explicit),
        (4, "zigzag", AxisType.Auto),
        (8, "contiguous", AxisType.Auto),
        (8, "striped", AxisType.Explicit),
    ],
)
def test_a_window_and_the_spans_of_each_row_are_two_calls_merged(ranks: int, layout: str, kind: AxisType) -> None:
    """As docs/masks.md shows it: spans are traced and differ between rows. A row of padding sees nothing in both calls.

    The first call sees the window, the second the later tokens of the query's span.
    """
    length, window, longest = 48, 9, 8
    spans = np.full((2, length), -1, np.int32)
    spans[0, 3:11], spans[0, 20:25], spans[1, 0:4], spans[1, 40:48] = 0, 1, 0, 1
    documents = np.repeat(np.int32([[0], [0]]), length, 1)
    documents[1, 30:34] = -1
    at = np.arange(length)
    distance = at[:, None] - at
    same = (spans[:, :, None] == spans[:, None]) & (spans[:, :, None] >= 0)
    seen = ((distance >= 0) & (distance <= window)) | same
    seen &= (documents[:, :, None] >= 0) & (documents[:, None] >= 0)
    ring = {"mesh": mesh_of(kind, sp=ranks), "axis_name": "sp", "layout": layout, "causal": True, "return_lse": True}

    def both(spans: Any, documents: Any, *operands: Any) -> Any:
        own, index = to_layout(spans, layout, ranks), to_layout(jnp.arange(length)[None], layout, ranks)

        def attend(*operands: Any) -> jax.Array:
            ids = to_layout(documents, layout, ranks)
            earlier = ring_attention(*operands, q_segment_ids=ids, sliding_window=(window, 0), **ring)
            later = ring_attention(
                *operands, q_segment_ids=jnp.where(ids < 0, -1, own), q_positions=-1 - index, kv_positions=-index,
                max_distance=(0, longest - 1), **ring,
            )  # fmt: skip
            return merge(Partial(*earlier), Partial(*later)).out

        return differentiated(in_order_of(layout, ranks, attend))(*operands)

    operands = query_key_value(2, length, 4, 2)
    close(
        jax.jit(both)(spans, documents, *operands),
        graded(lambda *operands: ring_attention(*operands, attention_mask=seen[:, None]), *operands),
    )


@pytest.mark.parametrize("count", [1, 4, 48, 34])
def test_the_chunks_of_a_cache_merge_in_one_program_of_elementwise_operations(count: int) -> None:
    """A reduction over the chunks would be a kernel of its own on a GPU, in every step of decoding.

    34 chunks are merged two at a time, and then 17 at a time.
    """
    large = 700.0 if count == 4 else 7.0  # merging many parts one by one is inexact at 700, where float32 is coarse
    parts = [partial((-INF, 3.0, -2.0, large)[seed % 4], seed) for seed in range(count)]
    chunks = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *parts)
    run = jax.jit(lambda x: merged_over(x, (), chunks=count))
    assert_same(run(chunks), functools.reduce(merge, parts))
    assert "stablehlo.reduce" not in run.lower(chunks).as_text()


class TestMonoid:
    @hypothesis.given(a=LSE, b=LSE)
    def test_it_is_commutative_bit_for_bit(self, a: float, b: float) -> None:
        x, y = partial(a, 1), partial(b, 2)
        jax.tree.map(np.testing.assert_array_equal, merge(x, y), merge(y, x))

    @hypothesis.given(a=LSE, b=LSE, c=LSE)
    def test_it_is_associative_up_to_rounding(self, a: float, b: float, c: float) -> None:
        x, y, z = partial(a, 1), partial(b, 2), partial(c, 3)
        left, right = merge(merge(x, y), z), merge(x, merge(y, z))
        # A weight is exp(lse - lse): the rounding error of each lse is relative to its size.
        rounding = 4 * max(abs(v) if np.isfinite(v) else 0 for v in (a, b, c)) * 2.0**-23
        np.testing.assert_allclose(left.lse, right.lse, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(left.out, right.out, rtol=0, atol=4 * rounding + 4e-6)

    @hypothesis.given(a=LSE)
    def test_a_result_without_keys_is_the_identity_bit_for_bit(self, a: float) -> None:
        x = partial(a)
        for merged in (merge(x, identity()), merge(identity(), x)):
            jax.tree.map(np.testing.assert_array_equal, merged, x)

    def test_nan_stays_in_its_own_row(self) -> None:
        lse = np.zeros((B, N, T), np.float32)
        lse[0, 1, 2] = np.nan
        for other in (partial(1.0), identity()):
            merged = merge(partial(lse), other)
            assert np.isnan(merged.lse[0, 1, 2])
            assert np.isnan(merged.out[0, 2, 1]).all()
            assert np.isnan(merged.lse).sum() == 1
            assert np.isnan(merged.out).sum() == H

    @pytest.mark.parametrize("large", [1e4, 1e30, -1e4, -1e30])
    def test_scores_of_any_size_are_safe(self, large: float) -> None:
        merged = merge(partial(large, 1), partial(large, 2))
        np.testing.assert_allclose(merged.lse, np.float32(large + np.log(2)))
        np.testing.assert_allclose(merged.out, (partial(large, 1).out + partial(large, 2).out) / 2, rtol=1e-6)


class TestBeyondTheMonoid:
    def test_a_part_without_output_is_a_part_of_zeros_bit_for_bit(self) -> None:
        lse = jnp.asarray(np.random.default_rng(3).standard_normal((B, N, T)), jnp.float32).at[0, 0, 0].set(-INF)
        for x in (partial(0.5), identity()):
            wanted = merge(x, Partial(jnp.zeros_like(x.out), lse))
            for a, b in ((x, Partial(None, lse)), (Partial(None, lse), x)):
                jax.tree.map(np.testing.assert_array_equal, merge(a, b), wanted)

    def test_two_parts_without_output_have_none_together(self) -> None:
        lse = jnp.zeros((B, N, T))
        merged = merge(Partial(None, lse), Partial(None, lse))
        assert merged.out is None
        np.testing.assert_allclose(merged.lse, np.log(2), rtol=1e-6)

    def test_a_part_of_no_weight_changes_no_bit(self) -> None:
        for x in (partial(0.5), identity()):
            jax.tree.map(np.testing.assert_array_equal, merge(x, Partial(None, identity().lse)), x)

    @pytest.mark.parametrize("name", ["out", "lse"])
    def test_integers_are_refused(self, name: str) -> None:
        x = partial(0.5)
        given = {"out": x.out, "lse": x.lse} | {name: jnp.int32(getattr(x, name))}
        with pytest.raises(InputError, match=f"b: has {name} of dtype int32"):
            merge(x, Partial(**given))

    def test_a_misfit_is_named_with_its_shape(self) -> None:
        x = partial(0.5)
        with pytest.raises(InputError, match=r"b: has out .*, lse .*, max_logits \(3,\)"):
            merge(x, Partial(x.out, x.lse, jnp.zeros(3)))
        with pytest.raises(InputError, match=r"b: has lse \(2, 3\)"):
            merge(x, Partial(None, x.lse[:, 0]))
