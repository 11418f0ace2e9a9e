# SPDX-License-Identifier: Apache-2.0
"""`teach` is the divergence of the two distributions, with its exact gradients, on every ring, layout and mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import from_layout, ring_attention, to_layout
from ringattn_core.errors import InputError, MeshError
from ringattn_core.ring import plan
from ringattn_sparse import launch, select, teach, teaching_kernels, tiles
from ringattn_testing.choosing import sizes_in, taught
from ringattn_testing.rings import RINGS, mesh_of
from ringattn_testing.teach_cases import (
    NAMES,
    B,
    T,
    close,
    drawn,
    graded,
    ids_of,
    segments,
    small_derivatives_are_kept,
    with_lse,
)

CASES: dict[int, dict[str, Any]] = {
    1: {"groups": 2, "softmax_scale": 0.7, "logits_soft_cap": 2.0},
    2: {"groups": 1, "causal": True, "selected": ids_of(2, 1, 4), "selected_size": 4},
    3: {"groups": 4, "causal": True},
    4: {"groups": 2, "causal": True, "q_segment_ids": segments(4), "selected": ids_of(4, 2, 3), "selected_size": 3},
    8: {"groups": 4, "selected": ids_of(8, 1, 1), "causal": True},
}


@pytest.mark.parametrize(("ranks", "layout", "kind"), RINGS)
def test_every_ring_and_layout_has_the_loss_and_the_gradients_of_the_oracle(
    ranks: int, layout: str, kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "UNROLLED", 2)  # larger rings are a scan, which compiles faster
    options = dict(CASES[ranks])
    if layout == "striped" and "selected" in options:
        options["selected_size"], options["selected"] = 1, ids_of(ranks, options["selected"].shape[2], 1)
    arrays = with_lse(drawn(ranks, of_groups=options["groups"] * (ranks % 2)), options)
    wanted = taught(**arrays, **options)
    by_rows = {name: options.pop(name) for name in ("q_segment_ids", "selected") if name in options}
    moved = {name: to_layout(x, layout, ranks) for name, x in (arrays | by_rows).items() if name != "lse"}
    moved["lse"] = jnp.moveaxis(to_layout(jnp.moveaxis(arrays["lse"], 2, 1), layout, ranks), 1, 2)
    mesh = mesh_of(kind, sp=ranks)
    value, gradients = graded(lambda **x: teach(**x, **options, mesh=mesh, axis_name="sp", layout=layout), moved)
    close((value, [from_layout(x, layout, ranks) for x in gradients]), wanted)


@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_lesson_on_one_device_is_that_of_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(50 + seed)
    size, groups, keys = (int(rng.choice(x)) for x in ((1, 3, 4, 64), (1, 2, 4), (T, 37, 70)))
    options: dict[str, Any] = {"groups": groups, "causal": bool(rng.integers(2))}
    if rng.integers(2):
        options |= {"selected": ids_of(seed, int(rng.choice([1, groups])), size, keys), "selected_size": size}
    if keys == T and rng.integers(2):
        options["q_segment_ids"] = segments(seed)
    arrays = with_lse(drawn(seed, keys=keys, of_groups=groups * int(rng.integers(2))), options)
    if rng.integers(2):
        arrays["weights"] = None
    plain = {"activation": None} if rng.integers(2) else {}
    exact = {"activation": lambda x: x, "derivative": np.ones_like} if plain else {}
    close(graded(lambda **x: teach(**x, **options, **plain), arrays), taught(**arrays, **options, **exact))


@pytest.mark.parametrize("by_choice", [False, True])
def test_many_tiles_teach_as_one(by_choice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 56
    options: dict[str, Any] = {"groups": 2, "causal": True}
    if by_choice:
        options |= {"selected": ids_of(1, 2, 4, tokens, tokens), "selected_size": 4}
    arrays = with_lse(drawn(1, keys=tokens, tokens=tokens), options)
    monkeypatch.setattr(tiles, "PLAIN", tiles.Limits(B * 4 * 12 * 11, 12, 8))
    ring = {"mesh": mesh_of(sp=2), "axis_name": "sp"}
    close(graded(lambda **x: teach(**x, **options, **ring), arrays), taught(**arrays, **options))


@pytest.mark.parametrize("tracked", [True, False])
def test_in_ones_own_shard_map_the_mean_is_over_the_ring(tracked: bool) -> None:
    """The arrays of the attention may be replicated over a mesh axis over which the indexer's are too."""
    options: dict[str, Any] = {"groups": 2, "causal": True}
    arrays = with_lse(drawn(3), options)
    spec = P("data", ("a", "b"))
    specs = dict.fromkeys(arrays, spec) | {"lse": P("data", None, ("a", "b"))}

    def local(arrays: dict[str, Any]) -> Any:
        return jax.lax.pmean(teach(**arrays, **options, axis_name=("a", "b")), "data")

    mesh = mesh_of(data=2, a=2, b=2)
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=tracked)
    close(graded(lambda **x: run(x), arrays), taught(**arrays, **options))


def test_a_loss_inside_a_shard_map_sends_gradients_home_and_sums_those_of_shared_arrays() -> None:
    options: dict[str, Any] = {"causal": True}
    arrays = with_lse(drawn(9), options)
    specs = dict.fromkeys(arrays, P(None, "sp")) | {"lse": P(None, None, "sp")}

    def local(arrays: dict[str, Any], scale: jax.Array) -> Any:
        def loss(learning: dict[str, Any], scale: jax.Array) -> Any:
            learning = learning | {"index_key": learning["index_key"] * scale}
            return teach(**arrays | learning, **options, axis_name="sp")

        return jax.grad(loss, (0, 1))({name: arrays[name] for name in NAMES}, scale)

    run = jax.shard_map(local, mesh=mesh_of(sp=4), in_specs=(specs, P()), out_specs=(P(None, "sp"), P()))
    gradients, dscale = jax.jit(run)(arrays, jnp.float32(1))
    wanted = taught(**arrays, **options)
    close((jnp.float32(wanted[0]), [gradients[name] for name in NAMES]), wanted)
    np.testing.assert_allclose(dscale, (wanted[1][1] * np.asarray(arrays["index_key"])).sum(), rtol=1e-4)


def test_explicit_axes_of_batch_and_heads_and_a_ring_that_vmap_plays() -> None:
    options: dict[str, Any] = {"groups": 2, "causal": True}
    arrays = with_lse(drawn(5), options)
    wanted, mesh = taught(**arrays, **options), mesh_of(AxisType.Explicit, data=2, sp=2, tp=2)
    specs = dict.fromkeys(arrays, P("data", "sp", "tp"))
    specs |= {"index_key": P("data", "sp"), "lse": P("data", "tp", "sp")}
    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    close(graded(lambda **x: teach(**x, **options, axis_name="sp"), placed), wanted)
    shards = {
        name: jnp.moveaxis(x.reshape(*x.shape[:axis], 4, -1, *x.shape[axis + 1 :]), axis, 0)
        for name, x in arrays.items()
        for axis in (2 if name == "lse" else 1,)
    }

    def played(**shards: Any) -> Any:
        return jax.vmap(lambda x: teach(**x, **options, axis_name="sp"), axis_name="sp")(shards)[0]

    value, gradients = graded(played, shards)
    joined = [jnp.moveaxis(x, 0, 1).reshape(exact.shape) for x, exact in zip(gradients, wanted[1], strict=True)]
    close((value, joined), wanted)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_near_as_its_products(dtype: Any) -> None:
    options: dict[str, Any] = {"causal": True, "groups": 2}
    arrays = with_lse(drawn(4, dtype=dtype), options)
    value, gradients = graded(lambda **x: teach(**x, **options), arrays)
    assert [x.dtype for x in gradients] == [dtype] * 3
    close((value, gradients), taught(**arrays, **options), 2.5e-2 if dtype == jnp.bfloat16 else 5e-3)


def test_derivatives_below_the_numbers_of_float16_are_kept() -> None:
    small_derivatives_are_kept(teach, drawn(4, dtype=jnp.float16), 2e-3)


def test_an_indexer_learns_what_attention_sees_from_its_own_choice() -> None:
    """`select`, attention to the choice with its `lse`, and `teach`: gradient steps lower the loss."""
    arrays = drawn(11)
    others = {name: arrays[name] for name in ("query", "key")}

    @jax.jit
    def step(learning: dict[str, Any]) -> Any:
        ids = select(**learning, count=4, size=4, forced=(0, 1), causal=True)
        chosen = {"selected": ids, "selected_size": 4}
        _, lse = ring_attention(**others, value=others["key"], return_lse=True, **chosen, causal=True)
        loss, gradients = jax.value_and_grad(lambda x: teach(**x, **others, lse=lse, **chosen, causal=True))(learning)
        return loss, jax.tree.map(lambda x, dx: x - 20 * dx, learning, gradients)

    learning, losses = {name: arrays[name] for name in NAMES}, []
    for _ in range(12):
        loss, learning = step(learning)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2


def test_only_the_arrays_of_the_indexer_have_a_gradient_and_keys_that_nobody_chose_have_none() -> None:
    chosen = {"selected": jnp.broadcast_to(jnp.array([1, 3, -1]), (B, T, 1, 3)), "selected_size": 8}
    arrays = with_lse(drawn(1), {})
    gradients = jax.jit(jax.grad(lambda x: teach(**x, **chosen)))(arrays)
    of_keys = np.asarray(gradients["index_key"])
    seen = np.isin(np.arange(T) // 8, [1, 3])
    assert not of_keys[:, ~seen].any() and of_keys[:, seen].all()
    assert not any(gradients[name].any() for name in ("query", "key", "lse"))


def test_scores_of_any_finite_size_and_queries_without_a_key_give_finite_numbers() -> None:
    ids = np.tile(np.arange(T, dtype=np.int32), (B, T, 1, 1))
    arrays = with_lse(drawn(1), {}) | {"selected": ids}
    program = jax.jit(jax.value_and_grad(lambda learning, others: teach(**learning, **others)))

    def run(arrays: dict[str, Any]) -> Any:
        return program({n: arrays[n] for n in NAMES}, {n: x for n, x in arrays.items() if n not in NAMES})

    far = arrays | {name: arrays[name] * 30 for name in ("query", "index_query")}
    value, gradients = run(with_lse(far, {}) | {"weights": jnp.full((B, T, 4), 1e4)})
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in gradients.values())
    value, gradients = run(arrays | {"selected": np.full_like(ids, -1)})
    assert value == 0 and not any(x.any() for x in gradients.values())
    for name, at in (("index_key", (0, 3, 0)), ("lse", (0, 1, 5))):
        value, _ = run(arrays | {name: arrays[name].at[at].set(jnp.nan)})
        assert np.isnan(value), name


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("size", [None, 1, 16])
def test_no_array_has_an_entry_for_each_query_and_key(
    size: int | None, by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRET", by_kernels)
    monkeypatch.setattr(launch, "capability", lambda: "9.0" if by_kernels else "7.5")
    most = (teaching_kernels.LAUNCH if by_kernels else tiles.PLAIN).entries
    tokens = 2**16 if by_kernels else 2**15
    shapes = {"index_query": (2, 16), "index_key": (16,), "weights": (2,), "query": (4, 16), "key": (2, 16)}
    arrays = {name: jax.ShapeDtypeStruct((1, tokens, *shape), jnp.bfloat16) for name, shape in shapes.items()}
    arrays["lse"] = jax.ShapeDtypeStruct((1, 4, tokens), jnp.float32)
    if size is not None:
        arrays["selected"] = jax.ShapeDtypeStruct((1, tokens, 1, 16), jnp.int32)
    options = {"selected_size": size or 1, "causal": True, "mesh": mesh_of(sp=2), "axis_name": "sp"}
    learning = [arrays.pop(name) for name in NAMES]

    def loss(learning: list[Any], others: dict[str, Any]) -> Any:
        return teach(*learning, **others, **options)

    program = jax.make_jaxpr(jax.grad(loss))(learning, arrays)
    assert ("pallas_call" in str(program)) == by_kernels
    assert max(sizes_in(program.jaxpr)) <= most < tokens * tokens / 16


def test_the_oracle_has_the_gradients_of_its_loss() -> None:
    options: dict[str, Any] = {"groups": 2, "causal": True, "selected": ids_of(3, 2, 3), "selected_size": 3}
    arrays = {name: np.float64(x) for name, x in with_lse(drawn(6), options).items()}
    _, gradients = taught(**arrays, **options)
    rng = np.random.default_rng(0)
    for name, gradient in zip(NAMES, gradients, strict=True):
        way = rng.normal(size=gradient.shape) * 1e-6
        ends = [taught(**arrays | {name: arrays[name] + sign * way}, **options)[0] for sign in (1, -1)]
        np.testing.assert_allclose(ends[0] - ends[1], 2 * (way * gradient).sum(), rtol=1e-4)


ARRAYS = with_lse(drawn(0), {})
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no lse": ({"lse": None}, "lse: is missing. Pass the lse [B, N, T]"),
    "lse of another order": ({"lse": jnp.swapaxes(ARRAYS["lse"], 1, 2)}, "lse: has shape (2, 48, 4)"),
    "lse of another dtype": ({"lse": ARRAYS["lse"].astype(jnp.bfloat16)}, "dtype bfloat16. Pass the lse"),
    "groups of index heads": ({"groups": 3}, "groups: is 3, which does not divide the 4 index heads"),
    "groups of query heads": (
        {"groups": 4, "query": ARRAYS["query"][:, :, :2], "lse": ARRAYS["lse"][:, :2]},
        "groups: is 4, which does not divide the 2 query heads",
    ),
    "ids of floats": ({"selected": np.zeros((B, T, 1, 2))}, "selected: has dtype float64"),
    "ids of another rank": ({"selected": ids_of(0, 1, 1)[..., 0]}, "selected: has shape (2, 48, 1)"),
    "ids of another batch": ({"selected": ids_of(0, 1, 1)[:1]}, "selected: has shape (1, 48, 1, 4)"),
    "ids of other groups": ({"selected": ids_of(0, 2, 1)}, "selected: has shape (2, 48, 2, 4)"),
    "ids out of range": ({"selected": ids_of(0, 1, 1), "selected_size": 4}, "selected: has ids from -1 to 47"),
    "a size alone": ({"selected_size": 4}, "selected_size: is 4, but there is no selected"),
    "straddling": ({"selected": ids_of(0, 1, 5), "selected_size": 5}, "in blocks of selected_size=5, has 10"),
    "striped": ({"selected": ids_of(0, 1, 2), "selected_size": 2, "layout": "striped"}, "in striped order"),
    "keys": ({"key": ARRAYS["key"][:, :40]}, "key: has shape (2, 40, 2, 8)"),
    "queries": ({"query": ARRAYS["query"][:, :40]}, "query: has 2 rows of 40 tokens"),
    "scale": ({"softmax_scale": -1.0}, "softmax_scale: got -1.0"),
    "cap": ({"logits_soft_cap": 0}, "logits_soft_cap: got 0"),
    "a flag of an array": ({"causal": np.ones(1)}, "causal: got array([1.])"),
    "the name of an activation": ({"activation": "relu"}, "activation: got 'relu'"),
    "axis": ({"axis_name": "tp"}, "'tp' is not an axis of the mesh"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_with_a_remedy(name: str) -> None:
    changes, says = BAD[name]
    with pytest.raises((InputError, MeshError)) as caught:
        teach(**ARRAYS | {"mesh": mesh_of(sp=8), "axis_name": "sp"} | changes)
    assert says in str(caught.value) and str(caught.value).count(". ") >= 1
