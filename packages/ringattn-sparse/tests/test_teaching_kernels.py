# SPDX-License-Identifier: Apache-2.0
"""The kernels of `teach`, interpreted on a CPU, have the loss and the gradients of the oracle.

`benchmarks/choosing.py --check` compares compiled kernels with plain JAX on a GPU.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import from_layout, to_layout
from ringattn_core.ring import plan
from ringattn_sparse import launch, teach, tiles
from ringattn_sparse import teaching_kernels as kernels
from ringattn_testing import teach_cases
from ringattn_testing.choosing import taught
from ringattn_testing.rings import RINGS, mesh_of
from ringattn_testing.teach_cases import B, T, graded, ids_of, segments, small_derivatives_are_kept, with_lse


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With small tiles, so that each program has several."""
    monkeypatch.setattr(launch, "INTERPRET", True)
    monkeypatch.setattr(plan, "UNROLLED", 2)  # larger rings are a scan, which compiles faster
    for name, size in {"QUERIES": 8, "KEYS": 16, "TILES": 2, "LAUNCH": kernels.LAUNCH._replace(queries=8)}.items():
        monkeypatch.setattr(kernels, name, size)
    jax.clear_caches()  # they have the programs of calls without kernels, and of other tiles
    yield
    jax.clear_caches()


def drawn(seed: int, **shapes: Any) -> dict[str, Any]:
    """With heads of 16; float16, whose errors are smaller, unless bfloat16 is asked for."""
    return teach_cases.drawn(seed, **{"sizes": (16, 16), "dtype": jnp.float16} | shapes)


def close(got: Any, wanted: Any, arrays: dict[str, Any]) -> None:
    """As near as the dtype of the arrays."""
    dtype = arrays["index_query"].dtype
    assert all(x.dtype == dtype for x in jax.tree.leaves(got[1]))
    teach_cases.close(got, wanted, 8e-3 if dtype == jnp.bfloat16 else 1e-3)


def bands(choices: int, size: int, keys: int, tokens: int) -> np.ndarray:
    """Neighbouring queries choose the same blocks, twice: other ones in each row and for each choice."""
    row, query, choice = np.ogrid[:B, :tokens, :choices]
    blocks = -(-keys // size)
    ids = (query // 16 + 2 * choice + row + 1) % blocks
    return np.stack([ids, -np.ones_like(ids), ids, (ids + blocks // 2) % blocks], -1).astype(np.int32)


OF_RINGS: dict[int, dict[str, Any]] = {
    1: {"groups": 2, "softmax_scale": 0.7, "logits_soft_cap": 2.0, "selected": ids_of(1, 1, 40), "selected_size": 40},
    2: {"groups": 1, "causal": True, "selected": ids_of(2, 1, 1)},
    3: {"groups": 4, "causal": True},
    4: {"groups": 2, "causal": True, "q_segment_ids": segments(4), "selected": ids_of(4, 2, 3), "selected_size": 3},
    8: {"groups": 4, "selected": ids_of(8, 1, 1), "causal": True},
}


@pytest.mark.parametrize(("ranks", "layout", "kind"), [ring for ring in RINGS if ring[:2] != (4, "striped")])
def test_rings_have_the_loss_of_the_oracle_and_small_ones_the_gradients(
    ranks: int, layout: str, kind: AxisType
) -> None:
    """Of larger rings, whose programs take long to compile, the loss alone: kernels do not know which hop they are in.
    A ring of 4 in striped order is left out, because a ring of 2 has it.

    With plain JAX, test_teach.py has the gradients of these rings.
    """
    options = dict(OF_RINGS[ranks])
    if layout == "striped" and "selected" in options:
        options["selected_size"], options["selected"] = 1, ids_of(ranks, options["selected"].shape[2], 1)
    dtype = jnp.bfloat16 if ranks == 4 else jnp.float16
    arrays = with_lse(drawn(ranks, of_groups=options["groups"] * (ranks % 2), dtype=dtype), options)
    wanted = taught(**arrays, **options)
    by_rows = {name: options.pop(name) for name in ("q_segment_ids", "selected") if name in options}
    specs = dict.fromkeys(arrays | by_rows, P(None, "sp")) | {"lse": P(None, None, "sp")}
    moved = {name: to_layout(x, layout, ranks) for name, x in (arrays | by_rows).items() if name != "lse"}
    moved["lse"] = jnp.moveaxis(to_layout(jnp.moveaxis(arrays["lse"], 2, 1), layout, ranks), 1, 2)

    def local(arrays: dict[str, Any]) -> jax.Array:
        return teach(**arrays, **options, axis_name="sp", layout=layout)

    mesh = mesh_of(kind, sp=ranks)
    moved = {name: jax.device_put(x, jax.NamedSharding(mesh, specs[name])) for name, x in moved.items()}
    # With check_vma JAX interprets no kernel: benchmarks/upstream/pallas_interpreter_vma.py.
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    if ranks < 4:
        value, gradients = graded(lambda **x: run(x), moved)
        close((value, [from_layout(x, layout, ranks) for x in gradients]), wanted, arrays)
    else:
        close((jax.jit(run)(moved), []), (wanted[0], []), arrays)


Case = tuple[dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "one group of all, and a shared key of more keys": ({"keys": 70, "heads": (3, 4, 1), "sizes": (32, 16)}, {}),
    "several key heads and index keys of a group": (
        {"tokens": 37, "heads": (4, 8, 4), "of_groups": 2},
        {"groups": 2, "logits_soft_cap": 1.5, "softmax_scale": 0.4},
    ),
    "a group for each head, with fewer key heads": (
        {"of_groups": 4, "heads": (8, 4, 2), "sizes": (16, 64)},
        {"groups": 4, "causal": True, "q_segment_ids": segments(7)},
    ),
    "blocks that every group chooses": (
        {"keys": 70, "tokens": 41, "heads": (4, 4, 1)},
        {"groups": 4, "selected": ids_of(5, 1, 3, 70, 41), "selected_size": 3},
    ),
    "blocks that each group chooses, of few tiles": (
        {"keys": 100, "of_groups": 2, "dtype": jnp.bfloat16},
        {"groups": 2, "selected": bands(2, 16, 100, T), "selected_size": 16},
    ),
}
PLAIN_CASES = {"several key heads and index keys of a group", "one group of all, and a shared key of more keys"}
"""Without weights and activation."""


def checked(arrays: dict[str, Any], options: dict[str, Any]) -> None:
    """`teach` on one device is the oracle."""
    numpys: dict[str, Any] = {}
    if "activation" in options:
        numpys = {"activation": lambda x: x, "derivative": np.ones_like}
    got = graded(lambda **x: teach(**x, **options), arrays)
    close(got, taught(**arrays, **options | numpys), arrays)


@pytest.mark.parametrize("name", CASES)
def test_one_device_has_the_loss_and_the_gradients_of_the_oracle(name: str) -> None:
    shapes, options = CASES[name]
    arrays = with_lse(drawn(len(name), **shapes), options)
    if name in PLAIN_CASES:
        arrays["weights"], options = None, options | {"activation": None}
    checked(arrays, options)


def test_many_launches_teach_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 23 queries and 24 keys, with programs of several tiles of each; some launches have nothing to do."""
    tokens, groups = 89, 2
    limits = tiles.Limits(B * groups * 23 * 24, 24, 8)
    assert [cut.size for cut in tiles.cuts(tokens, -(-tokens // 4), 4, B * groups, 0, limits)] == [23, 6]
    monkeypatch.setattr(kernels, "LAUNCH", limits)
    options: dict[str, Any] = {"groups": groups, "causal": True}
    options |= {"selected": bands(2, 4, tokens, tokens), "selected_size": 4}
    checked(with_lse(drawn(3, tokens=tokens, keys=tokens), options), options)


def test_tiles_of_the_size_that_gpus_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launch, "INTERPRET", True)
    tokens = 64 * 4 + 9
    options: dict[str, Any] = {"groups": 2, "causal": True, "q_segment_ids": segments(2, tokens)}
    shapes = {"tokens": tokens, "keys": tokens, "heads": (2, 2, 1), "sizes": (16, 128)}
    checked(with_lse(drawn(2, **shapes), options), options)


def test_infinite_lse_and_what_nobody_sees_count_nothing() -> None:
    """Of padding, products and scores may be infinite."""
    ids = segments(0)
    padding = jnp.asarray(ids == -1)[..., None, None]
    options: dict[str, Any] = {"groups": 2, "q_segment_ids": ids}
    arrays = with_lse(drawn(8, dtype=jnp.bfloat16), options)
    for name in ("index_query", "index_key", "query", "key"):
        arrays[name] = jnp.where(padding[..., 0] if name == "index_key" else padding, 3e38, arrays[name])
    arrays["lse"] = arrays["lse"].at[0, 1, 4].set(-jnp.inf).at[1, :, 3].set(-jnp.inf).at[1, 2:, 9].set(-jnp.inf)
    assert (ids[0, 4], *ids[1, [3, 9]]) > (-1, -1, -1)
    checked(arrays, options)


def test_derivatives_below_the_numbers_of_float16_are_kept() -> None:
    small_derivatives_are_kept(teach, drawn(4), 1e-3)


def test_vmapped_examples_teach_as_a_batch() -> None:
    options: dict[str, Any] = {"groups": 2, "causal": True}
    arrays = with_lse(drawn(5), options)

    def one(arrays: dict[str, Any]) -> jax.Array:
        return teach(**{name: x[None] for name, x in arrays.items()}, **options)

    close(graded(lambda **x: jax.vmap(one)(x).mean(), arrays), taught(**arrays, **options), arrays)


def program(arrays: dict[str, Any], **options: Any) -> str:
    return str(jax.make_jaxpr(jax.grad(lambda x: teach(**x, **options)))(arrays))


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({"dtype": jnp.float32}, {}),
    "heads of 192": ({"sizes": (16, 192)}, {}),
    "index heads of 8": ({"sizes": (8, 16)}, {}),
    "3 key heads of 2 groups": ({"heads": (4, 6, 3)}, {"groups": 2}),
    "another activation": ({}, {"activation": jnp.abs}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_have_no_kernel(name: str) -> None:
    shapes, options = OTHERS[name]
    assert "pallas_call" not in program(with_lse(drawn(1, **shapes), {}), **options)


@pytest.mark.parametrize(("capability", "kernel"), [("7.5", False), ("8.0", True), ("9.0", True), ("12.0", True)])
def test_nvidia_gpus_before_ampere_have_no_kernel(
    capability: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "capability", lambda: capability)
    assert program(with_lse(drawn(1), {})).count("pallas_call") == 4 * kernel


def test_programs_for_nvidia_gpus_alone_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMD GPUs, the capability is no number."""
    monkeypatch.setattr(launch, "INTERPRET", False)
    monkeypatch.setattr(launch, "capability", lambda: "gfx942:sramecc+:xnack-")
    traced = jax.jit(lambda **x: teach(**x)).trace(**with_lse(drawn(2), {}))
    for platform, kernel in {"cuda": True, "rocm": False, "cpu": False}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("triton" in text) == kernel, platform
