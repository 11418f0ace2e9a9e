# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity come out as NaN wherever they are visible, and nowhere else: forward and backward."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention

LENGTH, BAD = 12, 5
MESHES = [None, 4]


def attend(ranks: int | None, *x: Any, **options: Any) -> Any:
    if ranks is None:
        return ring_attention(*x, **options)
    mesh = jax.make_mesh((ranks,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    return ring_attention(*x, mesh=mesh, axis_name="sp", **options)


def arrays() -> list[jax.Array]:
    return [jax.random.normal(key, (1, LENGTH, 2, 4)) for key in jax.random.split(jax.random.key(0), 3)]


def rows(x: jax.Array) -> set[int]:
    """The tokens at which anything is NaN."""
    assert not jnp.isinf(x).any()
    return set(np.flatnonzero(np.isnan(np.asarray(x)).any((0, 2, 3))))


@pytest.mark.parametrize("ranks", MESHES)
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_only_rows_that_see_a_bad_entry_are_nan(ranks: int | None, value: float, operand: int):
    x = arrays()
    x[operand] = x[operand].at[0, BAD, 1, 2].set(value)
    out = attend(ranks, *x, causal=True, sliding_window=3)
    assert rows(out) == ({BAD} if operand == 0 else set(range(BAD, BAD + 4)))
    assert not jnp.isnan(out[:, :, 0]).any()


@pytest.mark.parametrize("ranks", MESHES)
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_only_gradients_that_depend_on_a_bad_entry_are_nan(ranks: int | None, operand: int):
    x = arrays()
    x[operand] = x[operand].at[0, BAD, 1, 2].set(jnp.inf)
    dq, dk, dv = jax.jit(jax.grad(lambda *x: attend(ranks, *x, causal=True, sliding_window=3).sum(), (0, 1, 2)))(*x)
    lost = {BAD} if operand == 0 else set(range(BAD, BAD + 4))
    assert rows(dq) == {row for row in lost if row < LENGTH}
    touched = {key for row in lost for key in range(row - 3, row + 1)}
    assert rows(dk) == rows(dv) == touched


@pytest.mark.parametrize("ranks", MESHES)
def test_a_bad_cotangent_reaches_what_its_row_saw(ranks: int | None):
    x = arrays()
    weight = jnp.ones_like(x[0]).at[0, BAD, 1, 2].set(jnp.nan)
    gradients = jax.jit(
        jax.grad(lambda *x: (attend(ranks, *x, causal=True, sliding_window=3) * weight).sum(), (0, 1, 2))
    )(*x)
    assert rows(gradients[0]) == {BAD}
    assert rows(gradients[1]) == rows(gradients[2]) == set(range(BAD - 3, BAD + 1))


@pytest.mark.parametrize("ranks", MESHES)
def test_a_bad_key_that_nobody_sees_shows_nowhere(ranks: int | None):
    x = arrays()
    for operand in (1, 2):
        x[operand] = x[operand].at[0, BAD].set(jnp.nan)
    ids = jnp.zeros((1, LENGTH), jnp.int32).at[0, BAD].set(-1)

    def f(*x: Any) -> Any:
        return attend(ranks, *x, q_segment_ids=ids, kv_segment_ids=ids)

    out, pull = jax.vjp(jax.jit(f), *x)
    assert jnp.isfinite(out).all() and (out[0, BAD] == 0).all()
    assert all(jnp.isfinite(g).all() for g in pull(jnp.ones_like(out)))


def test_a_bad_bias_is_seen_where_the_mask_lets_it():
    bias = jnp.zeros((1, 1, LENGTH, LENGTH)).at[0, 0, BAD, BAD - 1].set(jnp.nan).at[0, 0, 2, 7].set(jnp.nan)
    assert rows(ring_attention(*arrays(), None, bias, causal=True)) == {BAD}


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_bad_sink_is_seen_by_every_row_of_its_head(value: float):
    out, lse = ring_attention(*arrays(), jnp.array([0.0, value]), return_lse=True)
    assert jnp.isfinite(out[:, :, 0]).all() and jnp.isnan(out[:, :, 1]).all() and jnp.isnan(lse[:, 1]).all()


def test_a_sink_of_minus_infinity_is_no_sink():
    x = arrays()
    a, pull = jax.vjp(lambda s: ring_attention(*x, s, causal=True), jnp.full(2, -jnp.inf))
    assert (a == ring_attention(*x, causal=True)).all()
    assert (pull(jnp.ones_like(a))[0] == 0).all()
