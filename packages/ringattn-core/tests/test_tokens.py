# SPDX-License-Identifier: Apache-2.0
"""`shift`, `halo`, `write_cache` and `layout_batch` do on every ring what NumPy does to the whole sequence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import from_layout, halo, layout_batch, shift, to_layout, write_cache
from ringattn_core.errors import InputError, MeshError
from ringattn_core.placement.layout import LAYOUTS
from ringattn_testing.rings import mesh_of

B, T, C = 2, 48, 2
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(B, T, C)).astype(np.float32)
WEIGHTS = DRAW.normal(size=(4, B, T, C)).astype(np.float32)
IDS = np.repeat([[0, 1, 2, -1], [0, 3, 3, 4]], [20, 9, 16, 3], axis=1).astype(np.int32)
FORMS = ("automatic", "explicit", "own shard_map")
# Every layout on every ring, each layout in every form.
CASES = pytest.mark.parametrize(
    ("ranks", "layout", "form"),
    [(d, layout, FORMS[(i + j) % 3]) for j, layout in enumerate(LAYOUTS) for i, d in enumerate((1, 3, 4, 8))],
)


def mesh_in(form: str, **sizes: int) -> Mesh:
    return mesh_of(AxisType.Explicit if form == "explicit" else AxisType.Auto, **sizes)


def on(form: str, ranks: int, function: Callable[..., Any], split: tuple[bool, ...]) -> Callable[..., Any]:
    """`function` of arrays over a ring of `ranks`, in one of `FORMS`; the ring splits axis 1 of an array if `split`."""
    mesh = mesh_in(form, dp=1 if ranks == 8 else 2, sp=ranks)
    specs = tuple(P("dp", "sp" if tokens else None) for tokens in split)
    if form == "own shard_map":
        return jax.shard_map(lambda *x: function(*x, axis_name="sp"), mesh=mesh, in_specs=specs, out_specs=specs[0])

    def placed(*arrays: Any) -> Any:
        if form == "explicit":
            arrays = tuple(jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True))
        return function(*arrays, mesh=mesh, axis_name="sp")

    return placed


def moved(x: np.ndarray, place: int, ids: np.ndarray | None) -> np.ndarray:
    """For each token in natural order, `x` of the token `place` later of the same document, else 0."""
    found = np.zeros(x.shape)
    for row in range(B):
        for i in range(T):
            if 0 <= i + place < T and (ids is None or ids[row, i] == ids[row, i + place] >= 0):
                found[row, i] = x[row, i + place]
    return found


@CASES
def test_shift_and_halo_are_those_of_the_whole_sequence_with_their_gradients(
    ranks: int, layout: str, form: str
) -> None:
    x, ids, *weights = (to_layout(a, layout, ranks) for a in (X, IDS, *WEIGHTS))

    def work(x: Any, ids: Any, *weights: Any, **ring: Any) -> Any:
        ring["layout"] = layout
        near, far = halo(x, 2, segment_ids=ids, **ring), shift(x, 3, segment_ids=ids, **ring)
        return sum(a * b for a, b in zip((*near, far, shift(x, -1, **ring)), (*weights, weights[0]), strict=True))

    of = [(-2, IDS), (-1, IDS), (0, IDS), (3, IDS), (-1, None)]
    pairs = list(zip(of, (*WEIGHTS, WEIGHTS[0]), strict=True))
    run = on(form, ranks, work, (True,) * 6)
    out, pull = jax.vjp(jax.jit(lambda x: run(x, ids, *weights)), x)
    wanted = sum(moved(X, place, named) * w for (place, named), w in pairs)
    np.testing.assert_allclose(from_layout(out, layout, ranks), wanted, atol=1e-5)
    # The transpose of a look at a later token is a look at an earlier one.
    wanted = sum(moved(w, -place, named) for (place, named), w in pairs)
    np.testing.assert_allclose(from_layout(pull(jnp.ones_like(out))[0], layout, ranks), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "layout", "form"),
    [
        (1, "zigzag", FORMS[0]),
        (2, "contiguous", FORMS[2]),
        (3, "zigzag", FORMS[1]),
        (4, "striped", FORMS[2]),
        (8, "zigzag", FORMS[0]),
    ],
)
def test_a_cache_gets_the_entries_of_its_own_positions_with_their_gradients(ranks: int, layout: str, form: str) -> None:
    positions = np.array([[5, 40, -1, 47], [T, 0, 23, 24]])
    new, weights = X[:, :4] + 10, WEIGHTS[0]
    wanted, dcache, dnew = X.copy(), weights.copy(), np.zeros(new.shape)
    for row, token in np.ndindex(positions.shape):
        if 0 <= (at := positions[row, token]) < T:
            wanted[row, at], dcache[row, at], dnew[row, token] = new[row, token], 0, weights[row, at]
    run = on(form, ranks, lambda *x, **ring: write_cache(*x, layout=layout, **ring), (True, False, False))
    out, pull = jax.vjp(jax.jit(lambda cache, new: run(cache, new, positions)), to_layout(X, layout, ranks), new)
    np.testing.assert_array_equal(from_layout(out, layout, ranks), wanted)
    found = pull(jax.device_put(to_layout(weights, layout, ranks), out.sharding))
    np.testing.assert_array_equal(from_layout(found[0], layout, ranks), dcache)
    np.testing.assert_array_equal(found[1], dnew)


def test_only_the_halo_travels_and_a_cache_is_written_in_place() -> None:
    mesh = mesh_in("automatic", dp=2, sp=4)
    x = jax.device_put(X, NamedSharding(mesh, P("dp", "sp")))
    ring: dict[str, Any] = {"mesh": mesh, "axis_name": "sp"}
    for layout, permutes in (("contiguous", 1), ("zigzag", 2)):
        text = jax.jit(lambda x, layout=layout: halo(x, 2, layout=layout, **ring)).lower(x).compile().as_text()
        assert text is not None
        sends = [line for line in text.splitlines() if " collective-permute(" in line]
        assert len(sends) == permutes and all("f32[1,2,2]" in line for line in sends), sends
        assert "all-" not in text
    row, at = X[:, :1], jnp.array([[3], [30]])
    written = jax.jit(lambda x, new, at: write_cache((x, x), (new, new), at, **ring)).lower(x, row, at)
    text = written.compile().as_text()
    assert text is not None and "all-" not in text and "collective" not in text


@pytest.mark.parametrize("form", ["automatic", "explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_placed_in_layout_order_with_what_follows_from_tokens_and_documents(layout: str, form: str) -> None:
    mesh = mesh_in(form, data=2, sp=4)
    tokens, image = DRAW.integers(1, 100, (B, T)), DRAW.normal(size=(B, T, 3))
    batch = layout_batch({"tokens": tokens, "segment_ids": IDS, "image": image}, layout, mesh)
    wanted = {
        "tokens": tokens,
        "segment_ids": IDS,
        "image": image.astype(np.float32),
        "labels": moved(tokens, 1, IDS),
        "loss_weights": moved(np.ones((B, T)), 1, IDS),
        "positions": np.stack([np.concatenate([np.arange(n) for n in (20, 9, 16, 3)])] * B),
    }
    wanted["positions"][1, 20:45] = np.arange(25)
    assert batch.keys() == wanted.keys()
    for name, x in batch.items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "sp")), x.ndim)
        np.testing.assert_array_equal(from_layout(np.asarray(x), layout, 4), wanted[name])
    again = shift(batch["tokens"], 1, segment_ids=batch["segment_ids"], mesh=mesh, axis_name="sp", layout=layout)
    np.testing.assert_array_equal(again, batch["labels"])
    whole = layout_batch({"tokens": tokens, "loss_weights": np.full((B, T), 0.5)}, layout, mesh)
    assert whole.keys() == {"tokens", "labels", "loss_weights", "positions"}
    assert (np.asarray(whole["loss_weights"]) == 0.5).all() and int(whole["positions"].max()) == T - 1


def test_one_device_and_a_mesh_that_is_set_need_no_mesh() -> None:
    np.testing.assert_array_equal(shift(X, 2, segment_ids=IDS), moved(X, 2, IDS).astype(np.float32))
    assert int(shift(IDS, 60, fill=-1).max()) == -1
    filled = shift(X, 6, fill=jnp.float32(-np.inf), mesh=mesh_in("automatic", sp=8), axis_name="sp")
    assert np.isneginf(filled[:, -6:]).all()
    by_rows = jax.device_put(np.tile(X, (4, 1, 1)), NamedSharding(mesh_in("automatic", sp=8), P("sp")))
    found = shift(by_rows, 2, mesh=by_rows.sharding.mesh, axis_name="sp")  # the ring splits another axis before
    np.testing.assert_array_equal(found[:B], moved(X, 2, None).astype(np.float32))
    with jax.set_mesh(mesh_in("explicit", sp=8)):
        np.testing.assert_array_equal(shift(X, 2, axis_name="sp"), moved(X, 2, None).astype(np.float32))
    np.testing.assert_array_equal(write_cache(X, X[:, :1], jnp.array([T - 1]))[:, -1], X[:, 0])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ring: halo(X, 7, layout="zigzag", **ring), "width: 7 is more than the 6 consecutive tokens that each"),
        (lambda ring: halo(X, -1, **ring), "width: got -1. Pass how many tokens before each"),
        (lambda ring: shift(X, 1.5, **ring), "n: got 1.5. Pass an integer"),
        (lambda ring: shift(X, 1, segment_ids=IDS[:, 1:], **ring), "segment_ids: has shape"),
        (lambda ring: shift(X, 1, segment_ids=IDS / 2, **ring), "segment_ids: has dtype float"),
        (lambda ring: halo(X, 1, segment_ids=IDS + np.int64(2**32), **ring), "segment_ids: has values"),
        (lambda ring: shift(X, 1, axis_name="sp"), "is not an axis of any shard_map around this call. Pass mesh="),
        (lambda ring: write_cache(X, X[:, :1, :1], [3], **ring), "new: has shape"),
        (lambda ring: write_cache((X, X), X[:, :1], jnp.array([3]), **ring), "new: is the pytree PyTreeDef(*), and"),
        (lambda ring: write_cache(X, X[:, :2], jnp.array([3]), **ring), "positions: has shape"),
        (lambda ring: write_cache(X, X[:, :1], jnp.array([3.0]), **ring), "positions: has dtype float32"),
        (lambda ring: write_cache(X, X[:, :1], np.array([2**32]), **ring), "positions: has the value 4294967296"),
        (lambda ring: write_cache(X.astype(np.int8), X[:, :1], jnp.array([3]), **ring), "new: has dtype float32"),
        (lambda ring: write_cache(IDS.astype(np.int8), IDS[:, :1], jnp.array([3]), **ring), "new: has dtype int32"),
        (lambda ring: shift(IDS, 1, fill=0.5, **ring), "fill: got 0.5. Pass a number that an array of int32 can hold"),
        (lambda ring: shift(IDS, 1, fill="0"), "fill: got '0'. Pass a number"),
        (lambda ring: shift(IDS.astype(np.uint8), 1, fill=-1, **ring), "fill: got -1. Pass a number"),
        (lambda ring: shift(X.astype(np.float16), 1, fill=1e5, **ring), "fill: got 100000.0. Pass"),
        (lambda ring: to_layout(X, "zigzag", axis_name="sp"), "to_layout is for global arrays, and needs a mesh with"),
        (lambda ring: layout_batch({"tokens": X}, "striped", ring["mesh"]), "tokens: has shape (2, 48, 2). Pass [B"),
        (lambda ring: layout_batch({"tokens": IDS}, "striped", ring["mesh"], batch_axis_name="sp"), "share a mesh"),
        (lambda ring: layout_batch({"token": IDS}, "striped", ring["mesh"]), "batch: has 'token'. Pass arrays"),
        (lambda ring: layout_batch({"tokens": IDS}, "striped", None), "mesh is NoneType. Pass a jax.sharding.Mesh"),
        (lambda ring: layout_batch({"tokens": IDS, "segment_ids": IDS[:1]}, "striped", ring["mesh"]), "segment_ids:"),
        (lambda ring: layout_batch({"tokens": IDS, "segment_ids": IDS / 2}, "striped", ring["mesh"]), "has dtype"),
        (lambda _: layout_batch({"tokens": IDS[:1]}, "striped", mesh_in("automatic", dp=2, sp=4)), "rows: there are 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_a_remedy(call: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises((InputError, MeshError)) as caught:
        call({"mesh": mesh_in("automatic", sp=4), "axis_name": "sp"})
    assert said in str(caught.value)
