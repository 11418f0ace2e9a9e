# SPDX-License-Identifier: Apache-2.0
"""Promises on packing: the kernel gives, bit for bit, what core gives."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract import nonfinite
from ringattn_core.contract.protocol import Own
from ringattn_triton import packing
from ringattn_triton.packing import TILE, if_bad, keys_and_values, look

NOUGHT = jnp.zeros(2, jnp.int32)


def pair(dtype: Any, value_dim: int = 40) -> tuple[jax.Array, jax.Array]:
    """Keys and values with some of everything that is no finite number; more than one tile, the last not whole."""
    draw = np.random.default_rng(0)
    k, v = (jnp.asarray(draw.normal(size=(2, 31, 3, dim)), dtype) for dim in (40, value_dim))
    assert k.size > TILE and k.size % TILE
    return k.at[0, 3, 1, 2].set(jnp.inf).at[1, 30, 2].set(jnp.nan), v.at[0, 4, 1, 2].set(-jnp.inf).at[0, 3].set(jnp.nan)


def same(got: jax.Array, want: jax.Array) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_keys_and_values_are_packed_as_core_packs_them(dtype: Any, poison: bool) -> None:
    same(keys_and_values(*pair(dtype), poison), nonfinite.keys_and_values(*pair(dtype), poison))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("place", ["first key", "last key", "first value", "last value"])
def test_a_look_finds_what_is_no_number_anywhere_and_packs_then(
    place: str, value: float, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_AT_ONCE", 3)
    draw = np.random.default_rng(1)
    k, v = (jnp.asarray(draw.normal(size=(2, 131, 3, 40)), dtype) for _ in range(2))
    at = (0,) * 4 if place.startswith("first") else (-1,) * 4
    k, v = (k.at[at].set(value), v) if place.endswith("key") else (k, v.at[at].set(value))
    own = look(Own(k, v, NOUGHT))
    assert own.found.tolist() == [1, 0]
    for poison in (True, False):
        same(if_bad(own, poison), nonfinite.keys_and_values(k, v, poison))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_look_at_numbers_finds_nothing_however_large(dtype: Any) -> None:
    largest = jnp.full((1, 70, 3, 64), jnp.finfo(dtype).max, dtype)
    assert look(Own(largest, -largest, NOUGHT)).found.tolist() == [0, 0]


def test_values_of_another_size_are_packed_by_core() -> None:
    same(keys_and_values(*pair(jnp.bfloat16, 8), True), nonfinite.keys_and_values(*pair(jnp.bfloat16, 8), True))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1)], ids=str)
def test_a_vmapped_axis_is_packed_too(axes: tuple[int | None, int | None]) -> None:
    given = zip(pair(jnp.float32), axes, strict=True)
    k, v = (x if axis is None else jnp.stack([x, 2 * x], axis) for x, axis in given)
    both = keys_and_values, nonfinite.keys_and_values
    same(*(jax.vmap(functools.partial(f, poison=True), axes)(k, v) for f in both))
