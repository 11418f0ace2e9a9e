# SPDX-License-Identifier: Apache-2.0
"""`select` returns the blocks of highest score, exactly, on every ring, layout and mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import from_layout, to_layout
from ringattn_core.errors import InputError, MeshError
from ringattn_core.ring import plan
from ringattn_sparse import select, tiles
from ringattn_testing.choosing import chosen, sizes_in
from ringattn_testing.rings import RINGS, mesh_of

B, T, HEADS, D = 2, 48, 4, 8


def drawn(
    seed: int, *, dtype: Any = jnp.float32, keys: int = T, of_groups: int = 0, ties: bool = True, tokens: int = T
) -> list[jax.Array]:
    """Queries, keys and weights of small integers, whose sums are exact, so that scores tie; or normal numbers."""
    rng = np.random.default_rng(seed)
    shapes = (B, tokens, HEADS, D), (B, keys, *([of_groups] if of_groups else []), D), (B, tokens, HEADS)
    arrays = [rng.integers(-2, 3, shape) if ties else rng.normal(size=shape) for shape in shapes]
    return [jnp.asarray(x, dtype) for x in arrays]


def segments(seed: int, tokens: int = T) -> jax.Array:
    """Documents of random lengths, and padding in the middle and at the end."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, 4, (B, tokens)), 1)
    ids[0, tokens // 2 : tokens // 2 + 3], ids[1, -5:] = -1, -1
    return jnp.asarray(ids, jnp.int32)


def same(got: Any, wanted: Any) -> None:
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(got), wanted)


CASES: dict[int, dict[str, Any]] = {
    1: {"count": 3, "size": 4, "groups": 2, "forced": (1, 1)},
    2: {"count": 4, "size": 4, "groups": 4, "causal": True, "forced": (1, 2)},
    3: {"count": 5, "size": 2, "groups": 1, "causal": True, "pool": "mean"},
    4: {"count": 5, "size": 3, "groups": 2, "causal": True, "q_segment_ids": segments(4)},
    8: {"count": 6, "size": 3, "groups": 4, "pool": "mean", "kv_segment_ids": segments(8), "forced": (0, 1)},
}


@pytest.mark.parametrize(("ranks", "layout", "kind"), RINGS)
def test_every_ring_and_layout_chooses_the_best_blocks_and_of_equal_scores_the_smaller_ids(
    ranks: int, layout: str, kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "UNROLLED", 2)  # larger rings are a scan, which compiles faster
    options = CASES[ranks] | ({"size": 1} if layout == "striped" else {})
    dtype = jnp.bfloat16 if ranks < 4 else jnp.float32
    arrays = drawn(ranks, of_groups=options["groups"] * (ranks % 2), dtype=dtype, ties=ranks < 8)
    placed = {name: to_layout(x, layout, ranks) for name, x in options.items() if name.endswith("ids")}
    mesh = mesh_of(kind, sp=ranks)
    ring = {"mesh": mesh, "axis_name": "sp", "layout": layout}
    ids = jax.jit(lambda *x: select(*x, **options | placed | ring))(*(to_layout(x, layout, ranks) for x in arrays))
    same(from_layout(ids, layout, ranks), chosen(*arrays, **options))


@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_choice_on_one_device_is_that_of_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    size, groups, keys = (int(rng.choice(x)) for x in ((1, 3, 4, 64), (1, 2, 4), (T, 37, 70)))
    options: dict[str, Any] = {"size": size, "groups": groups, "causal": bool(rng.integers(2))}
    options["count"] = int(rng.integers(1, -(-keys // size) + 1))
    options["pool"] = str(rng.choice(["max", "mean"]))
    first = int(rng.integers(0, min(options["count"], 3)))
    options["forced"] = (first, int(rng.integers(0, options["count"] - first + 1)))
    if keys == T and rng.integers(2):
        options["q_segment_ids"] = segments(seed)
    ties = options["pool"] == "max" and bool(rng.integers(2))  # thirds are not exact
    query, key, weights = drawn(seed, keys=keys, of_groups=groups * int(rng.integers(2)), ties=ties)
    weights = weights if rng.integers(2) else None
    same(select(query, key, weights, **options), chosen(query, key, weights, **options))


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("ids", [False, True])
def test_many_tiles_choose_as_one(pool: str, ids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 56
    arrays = drawn(7, tokens=tokens, keys=tokens)
    options: dict[str, Any] = {"count": 5, "size": 4, "groups": 2, "pool": pool, "causal": True}
    options |= {"q_segment_ids": segments(1, tokens)} if ids else {}
    monkeypatch.setattr(tiles, "PLAIN", tiles.Limits(B * HEADS * 12 * 11, 12, 8))
    ring = {"mesh": mesh_of(sp=2), "axis_name": "sp"}
    same(jax.jit(lambda *x: select(*x, **options, **ring))(*arrays), chosen(*arrays, **options))


@pytest.mark.parametrize("tracked", [True, False])
def test_a_ring_of_two_axes_in_ones_own_shard_map_beside_a_batch_axis(tracked: bool) -> None:
    arrays, options = drawn(3, ties=False), {"count": 4, "size": 6, "groups": 2, "causal": True, "forced": (1, 1)}
    spec = P("data", ("a", "b"))

    def local(*x: Any) -> Any:
        return select(*x, **options, axis_name=("a", "b"))

    run = jax.shard_map(local, mesh=mesh_of(data=2, a=2, b=2), in_specs=spec, out_specs=spec, check_vma=tracked)
    same(jax.jit(run)(*arrays), chosen(*arrays, **options))


def test_arrays_with_explicit_axes_and_a_mesh_that_is_set_choose_alike() -> None:
    arrays, options = drawn(5), {"count": 4, "size": 6, "groups": 2, "causal": True}
    mesh, wanted = mesh_of(AxisType.Explicit, data=2, sp=2, tp=2), chosen(*arrays, **options)
    specs = P("data", "sp", "tp"), P("data", "sp"), P("data", "sp", "tp")
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    ids = jax.jit(lambda *x: select(*x, **options, axis_name="sp"))(*placed)
    assert tuple(ids.sharding.spec)[:2] == ("data", "sp")
    same(ids, wanted)
    with jax.set_mesh(mesh_of(sp=4)):
        same(select(*arrays, **options, axis_name="sp"), wanted)


def test_vmapped_examples_and_a_ring_that_vmap_plays() -> None:
    arrays, options = drawn(6), {"count": 4, "size": 6, "groups": 2, "causal": True}
    wanted = chosen(*arrays, **options)
    same(jax.vmap(lambda *x: select(*(a[None] for a in x), **options)[0])(*arrays), wanted)
    shards = [jnp.moveaxis(x.reshape(B, 4, T // 4, *x.shape[2:]), 1, 0) for x in arrays]
    ids = jax.vmap(lambda *x: select(*x, **options, axis_name="sp"), axis_name="sp")(*shards)
    same(jnp.moveaxis(ids, 0, 1).reshape(wanted.shape), wanted)


def test_other_activations_and_non_finite_scores_have_an_order() -> None:
    query, key, _ = drawn(2)
    for function, numpys in ((None, lambda x: x), (jnp.exp, np.exp), (jnp.abs, np.abs)):
        options = {"count": 5, "size": 2, "causal": True}
        same(select(query, key, activation=function, **options), chosen(query, key, activation=numpys, **options))
    one = jnp.ones((1, 1, 1, 1))
    key = jnp.asarray([0.0, jnp.nan, -0.0, -jnp.inf, jnp.inf, 1.0, jnp.nan]).reshape(1, 7, 1)
    ranked = [4, 5, 0, 2, 1, 3, 6]
    for count in range(1, 8):
        ids = select(one, key, count=count, activation=None)[0, 0, 0]
        assert ids.tolist() == sorted(ranked[:count])


def test_a_choice_has_no_gradient() -> None:
    query, key, weights = drawn(2)

    def loss(*x: Any) -> Any:
        ids = select(*x, count=2, mesh=mesh_of(sp=2), axis_name="sp")
        return (x[0][:, :, 0, 0] * ids[:, :, 0, 0].astype(jnp.float32)).sum()

    _, dkey, dweights = jax.grad(loss, (0, 1, 2))(query, key, weights)
    assert not dkey.any() and not dweights.any()


QUERY, KEY, WEIGHTS = drawn(0)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "more blocks than there are": ({"count": 13, "size": 4}, "count: is 13, but there are only 12 blocks of 4"),
    "no count": ({"count": 0}, "count: got 0"),
    "groups": ({"groups": 3}, "groups: is 3, which does not divide the 4 index heads"),
    "pool": ({"pool": "sum"}, "pool: got 'sum'"),
    "forced, of another form": ({"forced": 1}, "forced: got 1"),
    "forced, too many": ({"forced": (2, 3)}, "forced: is 2 first blocks and 3 newest ones"),
    "size": ({"size": 2.0}, "size: got 2.0"),
    "striped": ({"size": 2, "layout": "striped"}, "size: is 2, but in striped order"),
    "straddling shards": ({"size": 5}, "index_key, counted in blocks of size=5, has 10"),
    "padding inside a zigzag": (
        {"size": 5, "layout": "zigzag"},
        "size: is 5, which does not divide the 48 keys, whose end",
    ),
    "straddling chunks": ({"size": 4, "layout": "zigzag"}, "in blocks of size=4, has 12"),
    "keys": ({"index_key": KEY[..., :4]}, "index_key: has 2 rows, 1 heads of 4"),
    "dtypes": ({"index_key": KEY.astype(jnp.bfloat16)}, "index_key: has dtype bfloat16"),
    "integers": ({"index_query": QUERY.astype(jnp.int32)}, "index_query: has dtype int32"),
    "weights": ({"weights": WEIGHTS[..., :2]}, "weights: has shape"),
    "segment ids": ({"q_segment_ids": np.zeros((B, T))}, "q_segment_ids: has dtype float64"),
    "other segment ids": ({"kv_segment_ids": np.zeros((B, 40), int)}, "kv_segment_ids: has shape"),
    "one for all": ({"index_key": KEY[:, :40], "q_segment_ids": np.zeros((B, T), int)}, "kv_segment_ids: are missing"),
    "a flag of an array": ({"causal": np.ones(1)}, "causal: got array([1.])"),
    "the name of an activation": ({"activation": "relu"}, "activation: got 'relu'"),
    "axis": ({"axis_name": "tp"}, "'tp' is not an axis of the mesh"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_with_a_remedy(name: str) -> None:
    changes, says = BAD[name]
    arguments = {"index_query": QUERY, "index_key": KEY, "weights": WEIGHTS, "count": 4}
    ring = {"mesh": mesh_of(sp=8), "axis_name": "sp"}
    with pytest.raises((InputError, MeshError)) as caught:
        select(**arguments | ring | changes)
    assert says in str(caught.value) and str(caught.value).count(". ") >= 1


def test_blocks_that_straddle_shards_are_refused_in_ones_own_shard_map() -> None:
    def local(query: Any, key: Any) -> Any:
        return select(query, key, count=2, size=5, axis_name="sp")

    run = jax.shard_map(local, mesh=mesh_of(sp=4), in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    with pytest.raises(InputError, match="size: is 5, which does not divide the shard of a rank, of 12 keys"):
        run(QUERY, KEY)


def test_a_shard_map_over_the_ring_alone_beside_explicit_axes_is_refused() -> None:
    mesh = mesh_of(AxisType.Explicit, data=2, sp=2)
    placed = [jax.device_put(x, jax.NamedSharding(mesh, P("data", "sp"))) for x in (QUERY, KEY)]
    specs: dict[str, Any] = {"in_specs": P(None, "sp"), "out_specs": P(None, "sp"), "axis_names": {"sp"}}
    run = jax.shard_map(lambda *x: select(*x, count=2, axis_name="sp"), **specs)
    with jax.set_mesh(mesh), pytest.raises(MeshError, match="Make these axes of the shard_map too"):
        run(*placed)


@pytest.mark.parametrize("size", [1, 16])
def test_no_array_has_an_entry_for_each_query_and_key(size: int) -> None:
    tokens = 2**15
    query, key = (jax.ShapeDtypeStruct((1, tokens, *shape), jnp.bfloat16) for shape in ((2, 16), (16,)))
    mesh = mesh_of(sp=2)
    program = jax.make_jaxpr(lambda *x: select(*x, count=16, size=size, causal=True, mesh=mesh, axis_name="sp"))(
        query, key
    )
    assert max(sizes_in(program.jaxpr)) <= tiles.PLAIN.entries < tokens * tokens / 16
