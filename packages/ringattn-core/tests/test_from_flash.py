# SPDX-License-Identifier: Apache-2.0
"""Two functions of fused attention make a kernel whose rings agree with the xla backend in every layout."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import Backend, Feature, from_flash, ring_attention
from ringattn_core.backends.discovery import registered
from ringattn_core.contract import ordering
from ringattn_core.errors import BackendLoadError
from ringattn_core.ring import plan
from rings import mesh_of
from traced_calls import equations

CALLS: list[tuple[Any, ...]] = []
"""The calls of the two functions in the programs traced so far: queries, keys, causal."""


def probabilities(q: Any, k: Any, lse: Any, scale: float, causal: bool) -> Any:
    """The probabilities of each query head, and the log-sum-exp. A kernel may take an infinite `lse` to mean no key."""
    group = q.shape[2] // k.shape[2]
    CALLS.append((q.shape[1], k.shape[1], causal))
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, group, 2), preferred_element_type=jnp.float32) * scale
    if causal:
        scores = jnp.where(jnp.tri(q.shape[1], k.shape[1], dtype=bool), scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1) if lse is None else lse
    return jnp.exp(scores - jnp.where(jnp.isinf(lse), 0.0, lse)[..., None]), lse


def forward(q: Any, k: Any, v: Any, *, scale: float, causal: bool) -> Any:
    p, lse = probabilities(q, k, None, scale, causal)
    return jnp.einsum("bnts,bsnh->btnh", p.astype(q.dtype), jnp.repeat(v, q.shape[2] // k.shape[2], 2)), lse


def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, scale: float, causal: bool) -> Any:
    delta = jnp.einsum("btnh,btnh->bnt", dout.astype(jnp.float32), out.astype(jnp.float32))
    return backward_with_delta(q, k, v, out, lse, dout, scale=scale, causal=causal, delta=delta)


def backward_with_delta(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, scale: float, causal: bool, delta: Any
) -> Any:
    group = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, group, 2).astype(jnp.float32) for x in (k, v))
    p, _ = probabilities(q, k, lse, scale, causal)
    queries, given = q.astype(jnp.float32), dout.astype(jnp.float32)
    ds = p * (jnp.einsum("btnh,bsnh->bnts", given, values) - delta[..., None]) * scale
    dk, dv = jnp.einsum("bnts,btnh->bsnh", ds, queries), jnp.einsum("bnts,btnh->bsnh", p, given)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    return jnp.einsum("bnts,bsnh->btnh", ds, keys).astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)


FEATURES = (
    *(Feature.GRADIENTS, Feature.FLOAT32, Feature.BFLOAT16, Feature.CAUSAL, Feature.GROUPED_HEADS, Feature.SINKS),
    *(Feature.UNEQUAL_VALUE_DIM, Feature.ZIGZAG, Feature.STRIPED),
)
FLASH = Backend("flash", 1, ("cpu",), frozenset(FEATURES), kernel="nowhere:KERNEL")
KERNEL = from_flash(forward, backward)


@pytest.fixture(autouse=True)
def flash() -> Iterator[None]:
    CALLS.clear()
    with registered(FLASH, KERNEL):
        yield


def arrays(length: int, dtype: Any = np.float32, scale: float = 1.0) -> list[jax.Array]:
    draw, shapes = np.random.default_rng(length), ((2, length, 4, 8), (2, length, 2, 8), (2, length, 2, 6))
    return [jnp.asarray(draw.standard_normal(shape) * scale, dtype) for shape in shapes]


def differentiated(backend: str, ranks: int, **options: Any) -> Any:
    mesh = mesh_of(sp=ranks)

    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out = ring_attention(q, k, v, sinks, mesh=mesh, axis_name="sp", backend=backend, **options)
        return jnp.sum(jnp.sin(3 * out.astype(jnp.float32))), out

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))


def agrees(ranks: int, operands: list[jax.Array], tolerance: float = 2e-5, **options: Any) -> None:
    sinks = jnp.linspace(-1, 2, 4)
    got, want = (differentiated(name, ranks, **options)(*operands, sinks) for name in ("flash", "xla"))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1, np.abs(other).max()))


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_scores_far_above_those_that_a_query_sees_do_not_reach_gradients(layout: str):
    """Keys after a query have scores hundreds above its log-sum-exp: their probabilities would be infinite."""
    q, k, v = arrays(16)
    rising = jnp.linspace(0, 40, 16)[None, :, None, None]
    agrees(2, [jnp.abs(q) + 1, jnp.abs(k) * 0.1 + rising, v], tolerance=2e-3, causal=True, layout=layout)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_backward_pass_that_takes_delta_has_the_cotangent_of_the_log_sum_exp(layout: str):
    q, k, v = arrays(16)
    sinks, mesh = jnp.linspace(-1, 2, 4), mesh_of(sp=2)

    def gradients(backend: str) -> Any:
        def loss(*operands: Any) -> Any:
            options = {"mesh": mesh, "axis_name": "sp", "layout": layout, "backend": backend}
            out, lse = ring_attention(*operands, causal=True, return_lse=True, **options)
            return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.cos(lse))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, sinks)

    with_lse = Backend("with_lse", 1, ("cpu",), {*FEATURES, Feature.RETURN_LSE}, kernel="nowhere:KERNEL")
    with registered(with_lse, from_flash(forward, backward_with_delta)):
        for got, want in zip(gradients("with_lse"), gradients("xla"), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize(
    ("layout", "calls"),
    [
        ("contiguous", {(16, 16, True), (16, 16, False)}),
        ("zigzag", {(16, 16, True), (8, 8, False)}),
        ("striped", {(16, 16, True)}),
    ],
)
def test_the_functions_get_only_causal_and_full_calls(layout: str, calls: set[Any]):
    differentiated("flash", 4, causal=True, layout=layout).lower(*arrays(64), jnp.zeros(4))
    assert set(CALLS) == calls


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_no_branch_surrounds_a_call(layout: str, monkeypatch: pytest.MonkeyPatch):
    """XLA would run the sends synchronously."""
    monkeypatch.setattr(plan, "UNROLLED", 2)  # also those of a scan
    program = jax.make_jaxpr(differentiated("flash", 4, causal=True, layout=layout))(*arrays(64), jnp.zeros(4))
    branches = [equation.params for equation in equations(program.jaxpr) if equation.primitive.name == "cond"]
    # The choice of a platform is no branch at run time.
    assert all(params.get("branches_platforms") for params in branches)


def test_only_nvidia_gpus_copy():
    x = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    traced = jax.jit(ordering.later_than_its_send).trace(x)
    programs = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "rocm", "tpu")}
    assert [name for name, text in programs.items() if "stablehlo.or" in text] == ["cuda"]


def test_a_descriptor_that_declares_what_the_functions_cannot_have_is_refused():
    beyond = Backend("beyond", 1, ("cpu",), {*FEATURES, Feature.RETURN_LSE, Feature.BIAS}, kernel="nowhere:KERNEL")
    with (
        registered(beyond, KERNEL),
        pytest.raises(BackendLoadError, match="declares BIAS, RETURN_LSE, which its kernel cannot have"),
    ):
        ring_attention(*arrays(16), backend="beyond", causal=True)
