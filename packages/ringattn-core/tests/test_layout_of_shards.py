# SPDX-License-Identifier: Apache-2.0
"""Layouts of arrays on a mesh: the same order as on one device, the same sharding, and tokens move once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import from_layout, to_layout
from ringattn_core.errors import InputError, MeshError
from ringattn_testing.rings import mesh_of

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
LAYOUTS = ["zigzag", "striped"]
WHOLE = np.arange(2 * 16 * 3, dtype=np.int32).reshape(2, 16, 3)


def mesh_in(kind: str, data: int = 2, sp: int = 4) -> jax.sharding.Mesh:
    return mesh_of(KINDS[kind], data=data, sp=sp)


def same(got: Any, wanted: Any, sharding: NamedSharding) -> None:
    np.testing.assert_array_equal(np.asarray(got), wanted)
    assert got.sharding.is_equivalent_to(sharding, got.ndim)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("data", "sp"), P(None, ("sp", "data")), P("data")], ids=str)
def test_a_split_array_is_reordered_and_stays_split(kind: str, layout: str, jit: bool, spec: P) -> None:
    sharding = NamedSharding(mesh_in(kind), spec)
    ranks = 8 if spec == P(None, ("sp", "data")) else 4
    given = jax.device_put(WHOLE, sharding)
    there, back = ((jax.jit(f, static_argnums=(1, 2)) if jit else f) for f in (to_layout, from_layout))
    laid = there(given, layout, ranks)
    wanted = to_layout(WHOLE, layout, ranks)
    if kind == "automatic" and jit:
        np.testing.assert_array_equal(np.asarray(laid), wanted)
        np.testing.assert_array_equal(np.asarray(back(laid, layout, ranks)), WHOLE)
    else:
        same(laid, wanted, sharding)
        same(back(laid, layout, ranks), WHOLE, sharding)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_ring_of_another_size_than_the_shards_is_reordered_too(layout: str, ranks: int) -> None:
    for kind in KINDS:
        sharding = NamedSharding(mesh_in(kind), P("data", "sp"))
        got = to_layout(jax.device_put(WHOLE, sharding), layout, ranks)
        np.testing.assert_array_equal(np.asarray(got), to_layout(WHOLE, layout, ranks))


@pytest.mark.parametrize(("layout", "moves"), [("zigzag", "collective-permute"), ("striped", "all-to-all")])
@pytest.mark.parametrize("reorder", [to_layout, from_layout])
def test_only_tokens_that_change_their_device_travel(layout: str, moves: str, reorder: Any) -> None:
    mesh = mesh_in("explicit")
    x = jax.device_put(jnp.zeros((2, 64)), NamedSharding(mesh, P("data", "sp")))
    program = jax.jit(reorder, static_argnums=(1, 2)).lower(x, layout, 4).compile().as_text()
    assert moves in program and "all-gather" not in program


@pytest.mark.parametrize(
    ("layout", "data", "over"), [("zigzag", 2, "sp"), ("striped", 1, "sp"), ("zigzag", 2, ("sp", "data"))]
)
def test_over_automatic_axes_that_are_named_tokens_travel_too(layout: str, data: int, over: Any) -> None:
    """Under `jax.jit`, where JAX does not know that they split the array."""
    mesh, ranks = mesh_in("automatic", data), 4 if over == "sp" else 8
    split = NamedSharding(mesh, P("data" if over == "sp" else None, over))
    x, w = (jax.device_put(jnp.sin(jnp.arange(128.0) * n).reshape(2, 64), split) for n in (1, 2))

    def there_and_back(x: Any, w: Any) -> Any:
        laid = to_layout(x, layout, mesh=mesh, axis_name=over)
        return (laid * w).sum(), (laid, from_layout(laid, layout, ranks, mesh=mesh, axis_name=over))

    run = jax.jit(jax.grad(there_and_back, has_aux=True))
    text = run.lower(x, w).compile().as_text() or ""
    assert ("collective-permute" if layout == "zigzag" else "all-to-all") in text
    assert "all-gather" not in text and "all-reduce" not in text
    dx, (laid, back) = run(x, w)
    for got, wanted in ((laid, to_layout(np.asarray(x), layout, ranks)), (back, np.asarray(x))):
        same(got, wanted, split)
    same(dx, from_layout(np.asarray(w), layout, ranks), split)


def test_the_mesh_of_the_context_serves_and_what_does_not_fit_it_is_refused() -> None:
    mesh = mesh_in("automatic")
    with jax.set_mesh(mesh):
        for x in (WHOLE, jnp.asarray(WHOLE)):
            np.testing.assert_array_equal(to_layout(x, "zigzag", axis_name="sp"), to_layout(WHOLE, "zigzag", 4))
    with pytest.raises(MeshError, match="axis_name='tp' is not an axis of the mesh, whose axes are 'data', 'sp'"):
        to_layout(WHOLE, "zigzag", mesh=mesh, axis_name="tp")
    with pytest.raises(MeshError, match=r"axis_name is missing\. Say which axis of the mesh"):
        to_layout(WHOLE, "zigzag", 4, mesh=mesh)
    with pytest.raises(InputError, match=r"ring_size: got 2\. Pass 4, the ranks of axis_name=\('sp',\)"):
        to_layout(WHOLE, "zigzag", 2, mesh=mesh, axis_name="sp")


def test_an_array_with_explicit_axes_brings_its_mesh() -> None:
    split = NamedSharding(mesh_in("explicit"), P("data", "sp"))
    same(to_layout(jax.device_put(WHOLE, split), "zigzag", axis_name="sp"), to_layout(WHOLE, "zigzag", 4), split)


@pytest.mark.parametrize("kind", KINDS)
def test_contiguous_order_is_the_array_itself(kind: str) -> None:
    x = jax.device_put(WHOLE, NamedSharding(mesh_in(kind), P("data", "sp")))
    assert to_layout(x, "contiguous", 4) is x
