# SPDX-License-Identifier: Apache-2.0
"""The kernels of `select`, interpreted on a CPU, choose the blocks that the oracle chooses.

`benchmarks/choosing.py --check` compares compiled kernels with plain JAX on a GPU.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core import from_layout, to_layout
from ringattn_sparse import launch, select, tiles
from ringattn_sparse import selection_kernels as kernels
from ringattn_sparse.scores import relu
from ringattn_testing.choosing import chosen
from ringattn_testing.rings import RINGS, mesh_of

B, T = 2, 96


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "INTERPRET", True)
    jax.clear_caches()  # they have the programs of calls without kernels
    yield
    jax.clear_caches()


def drawn(
    seed: int, *, tokens: int = T, keys: int = T, heads: int = 4, size: int = 16, of_groups: int = 0
) -> list[Any]:
    """Queries, keys and weights of small integers, whose sums are exact, so that scores tie."""
    rng = np.random.default_rng(seed)
    shapes = (B, tokens, heads, size), (B, keys, *([of_groups] if of_groups else []), size), (B, tokens, heads)
    dtype = jnp.float16 if seed % 2 else jnp.bfloat16
    return [jnp.asarray(rng.integers(-2, 3, shape), dtype) for shape in shapes]


def segments(tokens: int) -> jax.Array:
    """Documents of random lengths, and padding in the middle and at the end."""
    ids = np.sort(np.random.default_rng(tokens).integers(0, 4, (B, tokens)), 1)
    ids[0, tokens // 2 : tokens // 2 + 3], ids[1, -5:] = -1, -1
    return jnp.asarray(ids, jnp.int32)


@pytest.mark.parametrize(("ranks", "layout"), [(ranks, layout) for ranks, layout, _ in RINGS])
def test_every_ring_and_layout_chooses_the_best_blocks_and_of_equal_scores_the_smaller_ids(
    ranks: int, layout: str
) -> None:
    options: dict[str, Any] = {"count": 5, "size": 1 if layout == "striped" else 2, "groups": 2}
    options |= {"causal": ranks != 3, "forced": (1, 1)}
    arrays, ids = drawn(ranks, of_groups=2 * (ranks % 2)), segments(T) if ranks in (3, 4) else None

    def local(ids: Any, *x: Any) -> jax.Array:
        return select(*x, **options, q_segment_ids=ids, axis_name="sp", layout=layout)

    # With check_vma JAX interprets no kernel: benchmarks/upstream/pallas_interpreter_vma.py.
    spec, mesh = P(None, "sp"), mesh_of(sp=ranks)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    got = run(*(x if x is None else to_layout(x, layout, ranks) for x in (ids, *arrays)))
    np.testing.assert_array_equal(from_layout(got, layout, ranks), chosen(*arrays, q_segment_ids=ids, **options))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one block and one query": ({"tokens": 1, "keys": 128, "heads": 2}, {"count": 1, "size": 128}),
    "blocks of a tile": ({"tokens": 300, "keys": 300, "heads": 2}, {"count": 2, "size": 128, "causal": True}),
    "blocks of half a tile": ({"tokens": 130, "keys": 520, "heads": 2}, {"count": 7, "size": 64, "forced": (2, 1)}),
    "single keys": ({"tokens": 70}, {"count": 20, "size": 1, "groups": 4}),
    "a group for each head, with segments": ({}, {"count": 4, "size": 4, "groups": 4, "q_segment_ids": segments(T)}),
    "the products themselves": ({}, {"count": 3, "size": 8, "activation": None, "causal": True}),
    "heads of 64": ({"size": 64}, {"count": 64, "size": 1, "causal": True}),
}


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_one_device_chooses_as_the_oracle(name: str, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a program holds its queries or reads them again."""
    monkeypatch.setattr(kernels, "LARGE_MEMORY", ("",) if held else ())
    monkeypatch.setattr(kernels, "TILES", 2)
    drawing, options = CASES[name]
    numpys = {"activation": lambda x: x} if "activation" in options else {}
    query, key, weights = drawn(len(name), **drawing)
    weights = weights if held else None
    assert kernels.fit(query, 64, options["size"], options["count"], "max", options.get("activation", relu))
    got = jax.jit(lambda *x: select(*x, **options))(query, key, weights)
    np.testing.assert_array_equal(got, chosen(query, key, weights, **options | numpys))


def test_many_launches_choose_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "PLAIN", tiles.PLAIN._replace(entries=B * 2 * 24 * 70))
    arrays, options = drawn(9, tokens=200, keys=96), {"count": 5, "size": 4, "groups": 2, "causal": True}
    np.testing.assert_array_equal(select(*arrays, **options), chosen(*arrays, **options))


def test_scores_that_are_not_finite_have_an_order() -> None:
    one = jnp.ones((1, 1, 1, 16), jnp.bfloat16)
    scores = jnp.asarray([0.0, jnp.nan, -0.0, -jnp.inf, jnp.inf, 1.0, jnp.nan], jnp.bfloat16)
    key = jnp.zeros((1, 7, 16), jnp.bfloat16).at[0, :, 0].set(scores)
    ranked = [4, 5, 0, 2, 1, 3, 6]
    for count in range(1, 8):
        ids = select(one, key, count=count, activation=None)[0, 0, 0]
        assert ids.tolist() == sorted(ranked[:count])


def test_vmapped_examples_and_a_ring_that_vmap_plays() -> None:
    arrays, options = drawn(6), {"count": 4, "size": 4, "groups": 2, "causal": True}
    wanted = chosen(*arrays, **options)
    got = jax.vmap(lambda *x: select(*(a[None] for a in x), **options)[0])(*arrays)
    np.testing.assert_array_equal(got, wanted)
    shards = [jnp.moveaxis(x.reshape(B, 4, T // 4, *x.shape[2:]), 1, 0) for x in arrays]
    ids = jax.vmap(lambda *x: select(*x, **options, axis_name="sp"), axis_name="sp")(*shards)
    np.testing.assert_array_equal(jnp.moveaxis(ids, 0, 1).reshape(wanted.shape), wanted)


OTHERS: list[dict[str, Any]] = [{"size": 3}, {"pool": "mean"}, {"activation": jnp.abs}, {"count": 65, "size": 1}]


@pytest.mark.parametrize("changes", [*OTHERS, {"dtype": jnp.float32}], ids=" and ".join)
def test_other_calls_have_no_kernel(changes: dict[str, Any]) -> None:
    def program(dtype: Any = jnp.bfloat16, **changes: Any) -> str:
        arrays = [x.astype(dtype) for x in drawn(1)]
        return str(jax.make_jaxpr(lambda *x: select(*x, **{"count": 2, "size": 4} | changes))(*arrays))

    assert "pallas_call" in program()
    assert "pallas_call" not in program(**changes)


@pytest.mark.parametrize(("capability", "kernel"), [("7.5", False), ("8.0", True), ("9.0", True), ("12.0", True)])
def test_nvidia_gpus_before_ampere_have_no_kernel(
    capability: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "capability", lambda: capability)
    program = jax.make_jaxpr(lambda *x: select(*x, count=2, size=4))(*drawn(1))
    assert ("pallas_call" in str(program)) == kernel


def test_an_amd_gpu_has_plain_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its capability is no number."""
    monkeypatch.setattr(launch, "INTERPRET", False)
    monkeypatch.setattr(launch, "capability", lambda: "gfx942:sramecc+:xnack-")
    arrays, options = drawn(2), {"count": 4, "size": 4}
    np.testing.assert_array_equal(select(*arrays, **options), chosen(*arrays, **options))
