# SPDX-License-Identifier: Apache-2.0
"""Promises on the rows of the backward pass: the kernels give what core gives, and read what is fit as it is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_reports import launches, needed
from ringattn_core import ring_attention
from ringattn_core.backends import discovery
from ringattn_core.contract import nonfinite, rounding
from ringattn_core.contract.protocol import OwnRows
from ringattn_triton import hopper
from ringattn_triton import rows as module
from ringattn_triton.block import TritonKernel
from ringattn_triton.operands import LOG2_E
from ringattn_triton.plugin import BACKEND
from ringattn_triton.rows import ELEMENTS, look, rows

NAN, INFINITY = float("nan"), float("inf")


def given(dtype: Any, head_dim: int = 40, value_dim: int = 24, length: int = 37) -> list[Any]:
    """Rows of more than one program, some of which see nothing, with what is no number in each array."""
    draw = np.random.default_rng(0)
    shapes = [(2, length, 3, head_dim), (2, length, 3, value_dim), (2, length, 3, value_dim)]
    q, dout, out = (jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes)
    lse, dlse = (jnp.asarray(draw.normal(size=(2, 3, length)), jnp.float32) for _ in range(2))
    seen = jnp.asarray(draw.random((2, 3, length)) < 0.8).at[:, :, :9].set(True).at[:, :, 9:11].set(False)
    q = q.at[0, 1, 0, 3].set(NAN).at[1, 2, 1].set(INFINITY)
    dout = dout.at[0, 3, 2, 1].set(NAN).at[1, 4, 0, 5].set(-INFINITY).at[1, 9, 1].set(NAN)
    out = out.at[1, 5, 2, 7].set(INFINITY).at[0, 10, 0].set(0)
    lse = lse.at[0, 1, 6].set(NAN).at[:, :, 9:11].set(-INFINITY)
    assert q[..., 0].size > ELEMENTS // 64
    return [q, dout, out, None, lse, dlse.at[1, 0, 7].set(INFINITY), seen]


def same(got: nonfinite.Rows, want: nonfinite.Rows) -> None:
    for name in ("q", "dout", "lse"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == theirs.dtype, name
        np.testing.assert_array_equal(mine.astype(jnp.float32), theirs.astype(jnp.float32), name)
    for name in ("delta", "whole"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), 1e-5, 1e-5, err_msg=name)


@pytest.mark.parametrize("dims", [(40, 24), (64, 64), (8, 136)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rows_are_those_of_core(dtype: Any, dims: tuple[int, int]) -> None:
    arrays = given(dtype, *dims)
    got = rows(*arrays)
    same(got, nonfinite.rows(*arrays))
    lost = np.isnan(got.lse)
    assert {(0, 2, 3), (1, 0, 4), (1, 2, 5), (0, 1, 6), (1, 0, 7)} == set(zip(*np.nonzero(lost), strict=True))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (got.q, got.dout, got.delta))


def test_an_output_in_float32_is_not_rounded_nor_is_one_in_two_parts() -> None:
    q, dout, out, rest, *others = given(jnp.bfloat16)
    exact = jnp.asarray(np.random.default_rng(1).normal(size=out.shape), jnp.float32)
    want = nonfinite.rows(q, dout, exact, rest, *others)
    same(rows(q, dout, exact, rest, *others), want)
    in_two = exact.astype(jnp.bfloat16), rounding.rest(exact)
    got = rows(q, dout, *in_two, *others)
    same(got, nonfinite.rows(q, dout, *in_two, *others))
    np.testing.assert_allclose(got.delta, want.delta, 1e-4, 1e-4)


def test_a_backward_pass_has_its_rows_from_the_kernel() -> None:
    gradient = jax.grad(lambda q: ring_attention(q, q, q, backend="triton").sum())
    names = [call.name for call, _ in launches(jax.make_jaxpr(gradient)(jnp.ones((1, 16, 2, 8))).jaxpr)]
    assert names.count("ringattn_rows") == 1


@pytest.mark.parametrize("axes", [(0, 0, 0, None, 0, 0, 0), (0, None, 1, None, None, 0, None)], ids=str)
def test_a_vmapped_axis_has_rows_too(axes: tuple[int | None, ...]) -> None:
    arrays = given(jnp.float32)
    made = [x if axis is None else jnp.stack([x, x], axis) for x, axis in zip(arrays, axes, strict=True)]
    same(jax.vmap(rows, axes)(*made), jax.vmap(nonfinite.rows, axes)(*made))


def fit_rows(dtype: Any) -> OwnRows:
    """The rows of `given` with nothing in them that is no number, some of which see nothing."""
    draw = np.random.default_rng(2)
    q, dout, out = (jnp.asarray(draw.normal(size=(2, 37, 3, size)), dtype) for size in (40, 24, 24))
    lse, dlse = (jnp.asarray(draw.normal(size=(2, 3, 37)), jnp.float32) for _ in range(2))
    return OwnRows(q, dout.at[:, 9:11].set(0), out, None, lse.at[:, :, 9:11].set(-INFINITY), dlse)


UNFIT: dict[str, dict[str, tuple[tuple[int, ...], float]]] = {
    "nothing": {},
    "first query": {"q": ((0, 0, 0, 0), NAN), "lse": ((0, 0, 0), NAN)},
    "last query": {"q": ((1, 36, 2, 39), INFINITY), "lse": ((1, 2, 36), NAN)},
    "query that sees nothing": {"q": ((1, 10, 2, 39), -INFINITY)},
    "cotangent": {"dout": ((1, 36, 2, 23), INFINITY)},
    "cotangent of what sees nothing": {"dout": ((0, 9, 1, 3), NAN)},
    "any cotangent of what sees nothing": {"dout": ((0, 9, 1, 3), 1e-30)},
    "output": {"out": ((0, 3, 0, 0), NAN)},
    "lse": {"lse": ((1, 2, 5), INFINITY)},
    "cotangent of the lse": {"dlse": ((1, 2, 5), -INFINITY)},
}


@pytest.mark.parametrize("bad", UNFIT)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_look_finds_rows_that_are_not_fit_wherever_they_are_and_mends_them_then(
    bad: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 3)
    own = fit_rows(dtype)
    own = own._replace(**{name: getattr(own, name).at[at].set(x) for name, (at, x) in UNFIT[bad].items()})
    given, found = look(own, jnp.zeros(hopper.COUNTS, jnp.int32))
    assert found.tolist() == [0] * hopper.ROWS_AT.value + [int(bad != "nothing")]
    assert own.dlse is not None and given.q is own.q and given.dout is own.dout
    seen = ~jnp.isneginf(own.lse)
    want = nonfinite.rows(own.q, own.dout, own.out, own.rest, own.lse, own.dlse, seen)
    np.testing.assert_allclose(given.lse, np.where(seen, want.lse * LOG2_E, 0.0), 1e-6)
    np.testing.assert_allclose(given.delta, want.delta, 1e-5, 1e-5)
    if bad != "nothing":
        assert given.mended is not None
        for got, expected in zip(given.mended, (want.q, want.dout), strict=True):
            np.testing.assert_array_equal(got.astype(jnp.float32), expected.astype(jnp.float32))


def test_a_look_takes_an_output_in_two_parts_and_no_cotangent_of_the_lse() -> None:
    own = fit_rows(jnp.bfloat16)
    exact = jnp.asarray(np.random.default_rng(1).normal(size=own.out.shape), jnp.float32)
    own = own._replace(out=exact.astype(jnp.bfloat16), rest=rounding.rest(exact), dlse=None)
    given, found = look(own, jnp.zeros(hopper.COUNTS, jnp.int32))
    nothing = jnp.zeros_like(own.lse)
    want = nonfinite.rows(own.q, own.dout, exact, None, own.lse, nothing, ~jnp.isneginf(own.lse))
    np.testing.assert_allclose(given.delta, want.delta, 1e-4, 1e-4)
    assert not found.any()


class Copying(TritonKernel):
    """The kernel that has its rows made fit beforehand."""

    counts = 0


ROWS = {
    "nothing": None,
    "query": ("q", (0, 20, 1, 3), NAN),
    "query of padding": ("q", (0, 46, 0, 5), INFINITY),
    "cotangent": ("dout", (1, 30, 0, 2), NAN),
    "cotangent of padding": ("dout", (1, 1, 1, 2), -INFINITY),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "soft cap and slopes": {"logits_soft_cap": 9.0, "alibi_slopes": jnp.array([0.2, 0.01]), "causal": True},
    "dropout": {"dropout_prob": 0.2, "dropout_seed": 3},
    "bias": {"bias": 0.1 * np.arange(48, dtype=np.float32)[None, None, None] * np.ones((1, 2, 48, 1), np.float32)},
}


def gradients(backend: str, q: Any, k: Any, v: Any, dout: Any, many: bool = False, **options: Any) -> tuple[set, list]:
    """What is launched, and the gradients of documents with padding behind, or before."""
    ids = jnp.asarray(np.stack([np.arange(48) // 16, np.arange(48) // 16]).astype(np.int32))
    ids = ids.at[0, 44:].set(-1).at[1, :3].set(-1)
    bias = options.pop("bias", None)

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return ring_attention(
            q, k, v, None, bias, q_segment_ids=ids, kv_segment_ids=ids, backend=backend, **options
        )  # fmt: skip

    def back(dout: Any, *arrays: Any) -> Any:
        given = arrays if bias is None else (*arrays, jnp.asarray(bias))
        return jax.vjp(lambda *given: attend(*given, *[None] * (4 - len(given))), *given)[1](dout)

    program = jax.jit(jax.vmap(back) if many else back)
    arrays = [jnp.stack([x, 2 * x]) for x in (dout, q, k, v)] if many else (dout, q, k, v)
    names = {call.name for call, _ in launches(program.trace(*arrays).jaxpr.jaxpr)}
    return names, [np.asarray(x, np.float32) for x in program(*arrays)]


@pytest.mark.parametrize("bad", ROWS)
@pytest.mark.parametrize(("option", "head_dim"), [*((name, 72) for name in OPTIONS), ("causal", 24)], ids=str)
def test_gradients_are_those_of_rows_that_are_made_fit_beforehand(option: str, head_dim: int, bad: str) -> None:
    draw = np.random.default_rng(5)
    shape = (2, 48, 2, head_dim)
    arrays = {name: jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for name in ("q", "k", "v", "dout")}
    what = ROWS[bad]
    if what is not None:
        arrays[what[0]] = arrays[what[0]].at[what[1]].set(what[2])
    names, got = gradients("triton", **arrays, **OPTIONS[option])
    with discovery.registered(dataclasses.replace(BACKEND, name="copying"), Copying()):
        others, want = gradients("copying", **arrays, **OPTIONS[option])
    assert "ringattn_judging" in names and "ringattn_judging" not in others
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    if option == "causal":
        plain = gradients("xla", **arrays, **OPTIONS[option])[1]
        for x, y in zip(got, plain, strict=True):
            np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
            np.testing.assert_allclose(x, y, 3e-2, 3e-2)
    assert np.isnan(got[0]).any() == (bad in ("query", "cotangent"))


@pytest.mark.parametrize("bad", [None, "query of padding"])
def test_of_many_examples_the_rows_are_made_fit_beforehand(bad: str | None) -> None:
    draw = np.random.default_rng(6)
    q, k, v, dout = (jnp.asarray(draw.normal(size=(2, 48, 2, 24)), jnp.float32) for _ in range(4))
    q = q if bad is None else q.at[ROWS[bad][1]].set(NAN)
    got, want = (gradients(backend, q, k, v, dout, many=True, causal=True)[1] for backend in ("triton", "xla"))
    for x, y in zip(got, want, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, 1e-4, 1e-4)


def test_with_sinks_core_asks_for_more_and_has_the_rows_made_fit() -> None:
    q = jnp.ones((1, 16, 2, 72))
    gradient = jax.grad(lambda q, sinks: ring_attention(q, q, q, sinks, backend="triton").sum(), (0, 1))
    names = [call.name for call, _ in launches(jax.make_jaxpr(gradient)(q, jnp.zeros(2)).jaxpr)]
    assert "ringattn_rows" in names and "ringattn_judging" not in names


@pytest.mark.parametrize(("head_dim", "value_dim"), [(128, 128), (64, 64), (72, 24)])
def test_what_is_looked_at_is_not_copied_as_well(head_dim: int, value_dim: int) -> None:
    """Nor where keys and values are packed, which core does when it is time for that."""
    q, v = jnp.ones((1, 64, 2, head_dim), jnp.bfloat16), jnp.ones((1, 64, 2, value_dim), jnp.bfloat16)

    def back(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(lambda *arrays: ring_attention(*arrays, backend="triton"), q, k, v)[1](dout)

    names = needed(jax.make_jaxpr(back)(q, q, v, v).jaxpr)
    assert "ringattn_judging" in names and "ringattn_rows" not in names


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("forbidden", ["segments", "bias"])
def test_values_may_be_so_large_that_the_products_of_what_sees_nothing_are_infinite(forbidden: str, dtype: Any) -> None:
    draw = np.random.default_rng(7)
    q, k, v, dout = (jnp.asarray(draw.normal(size=(2, 48, 2, 24)), dtype) for _ in range(4))
    dout = dout.at[0, 44:].multiply(1e18).at[1, :3].multiply(1e18)
    bias = np.zeros((2, 1, 48, 48), np.float32)
    bias[0, :, 44:] = bias[1, :, :3] = -INFINITY
    options = {"causal": True} if forbidden == "segments" else {"bias": bias}
    got, want = (gradients(backend, q, k, v * 1e25, dout, **options)[1] for backend in ("triton", "xla"))
    for x, y in zip(got, want, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, 3e-2, 3e-2 * np.abs(y).max())
