# SPDX-License-Identifier: Apache-2.0
"""Two functions of fused attention make a kernel whose rings agree with the xla backend in every layout."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ringattn_core import Backend, Feature, from_flash, ring_attention
from ringattn_core.backends.discovery import registered
from ringattn_core.contract import ordering
from ringattn_core.errors import BackendLoadError
from ringattn_core.ring import plan
from ringattn_testing.flash import attended, delta_of, gradients
from ringattn_testing.rings import close, differentiated, drawn, graded, mesh_of
from ringattn_testing.traced_calls import equations

CALLS: list[tuple[Any, ...]] = []
"""The calls of the two functions in the programs traced so far: queries, keys, causal."""


def static_mask(q: Any, k: Any, causal: bool) -> Any:
    CALLS.append((q.shape[1], k.shape[1], causal))
    return jnp.tri(q.shape[1], k.shape[1], dtype=bool) if causal else None


def forward(q: Any, k: Any, v: Any, *, scale: float, causal: bool) -> Any:
    return attended(q, k, v, scale, static_mask(q, k, causal))


def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, scale: float, causal: bool) -> Any:
    return gradients(q, k, v, lse, dout, delta_of(out, dout), scale, static_mask(q, k, causal))


def backward_with_delta(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, scale: float, causal: bool, delta: Any
) -> Any:
    return gradients(q, k, v, lse, dout, delta, scale, static_mask(q, k, causal))


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


def arrays(length: int) -> list[jax.Array]:
    return [*drawn((2, length, 4, 8), (2, length, 2, 8), (2, length, 2, 6)), jnp.linspace(-1, 2, 4)]


def call(backend: str, ranks: int, **options: Any) -> Any:
    over: dict[str, Any] = {"mesh": mesh_of(sp=ranks), "axis_name": "sp", "backend": backend, "causal": True}
    return functools.partial(ring_attention, **over, **options)


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_scores_far_above_those_that_a_query_sees_do_not_reach_gradients(layout: str):
    """Keys after a query have scores hundreds above its log-sum-exp: their probabilities would be infinite."""
    q, k, v, sinks = arrays(16)
    operands = jnp.abs(q) + 1, jnp.abs(k) * 0.1 + jnp.linspace(0, 40, 16)[None, :, None, None], v, sinks
    close(*(graded(call(name, 2, layout=layout), *operands) for name in ("flash", "xla")), 2e-3, 2e-3)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_backward_pass_that_takes_delta_has_the_cotangent_of_the_log_sum_exp(layout: str):
    with_lse = Backend("with_lse", 1, ("cpu",), {*FEATURES, Feature.RETURN_LSE}, kernel="nowhere:KERNEL")
    with registered(with_lse, from_flash(forward, backward_with_delta)):
        found = [graded(call(name, 2, layout=layout, return_lse=True), *arrays(16)) for name in ("with_lse", "xla")]
    close(*found, 5e-5, 2e-5)


@pytest.mark.parametrize(
    ("layout", "calls"),
    [
        ("contiguous", {(16, 16, True), (16, 16, False)}),
        ("zigzag", {(16, 16, True), (8, 8, False)}),
        ("striped", {(16, 16, True)}),
    ],
)
def test_the_functions_get_only_causal_and_full_calls(layout: str, calls: set[Any]):
    jax.make_jaxpr(differentiated(call("flash", 4, layout=layout)))(*arrays(64))
    assert set(CALLS) == calls


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_no_branch_surrounds_a_call(layout: str, monkeypatch: pytest.MonkeyPatch):
    """XLA would run the sends synchronously."""
    monkeypatch.setattr(plan, "UNROLLED", 2)  # also those of a scan
    program = jax.make_jaxpr(differentiated(call("flash", 4, layout=layout)))(*arrays(64))
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
