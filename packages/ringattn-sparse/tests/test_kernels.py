# SPDX-License-Identifier: Apache-2.0
"""The kernels of `select`, interpreted on a CPU, choose the blocks that the oracle chooses.

A GPU compiles them in `benchmarks/choosing.py --check`.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core import from_layout, to_layout
from ringattn_sparse import kernels, select, tiles
from ringattn_testing.choosing import chosen
from ringattn_testing.rings import mesh_of


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "INTERPRET", True)
    jax.clear_caches()  # a program of another test has the same key
    yield
    jax.clear_caches()


def drawn(
    seed: int, *, tokens: int = 96, keys: int = 96, heads: int = 4, size: int = 16, of_groups: int = 0, dtype: Any = jnp.bfloat16
) -> list[jax.Array]:
    """Small integers: sums are exact, and many scores are equal."""
    rng = np.random.default_rng(seed)
    shapes = (2, tokens, heads, size), (2, keys, *([of_groups] if of_groups else []), size), (2, tokens, heads)
    return [jnp.asarray(rng.integers(-2, 3, shape), dtype) for shape in shapes]


def taken(*arrays: Any, **options: Any) -> bool:
    program = jax.make_jaxpr(lambda *x: select(*x, **options))(*arrays)
    return "pallas_call" in str(program)


def segments(ranks: int) -> jax.Array:
    ids = np.sort(np.random.default_rng(ranks).integers(0, 4, (2, 96)), 1)
    ids[0, 48:51], ids[1, -5:] = -1, -1
    return jnp.asarray(ids, jnp.int32)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, "contiguous"), *itertools.product((2, 3, 4, 8), ("contiguous", "zigzag", "striped"))]
)
def test_every_ring_and_layout_chooses_the_best_blocks_and_of_equal_scores_the_smaller_ids(
    ranks: int, layout: str
) -> None:
    arrays = drawn(ranks, of_groups=2 * (ranks % 2), dtype=jnp.float16 if ranks == 3 else jnp.bfloat16)
    options: dict[str, Any] = {"count": 5, "size": 1 if layout == "striped" else 2, "groups": 2}
    options |= {"causal": ranks != 3, "forced": (1, 1), "q_segment_ids": segments(ranks) if ranks in (3, 4) else None}
    ring = {"axis_name": "sp", "layout": layout}
    placed = {name: x if x is None else to_layout(x, layout, ranks) for name, x in [("q_segment_ids", options["q_segment_ids"])]}

    def local(ids: Any, *x: Any) -> jax.Array:
        return select(*x, **options | ring | {"q_segment_ids": ids})

    tokens = P(None, "sp")
    run = jax.shard_map(
        local, mesh=mesh_of(sp=ranks), in_specs=tokens, out_specs=tokens, check_vma=False
    )  # JAX cannot interpret a kernel under check_vma
    ids = jax.jit(run)(placed["q_segment_ids"], *(to_layout(x, layout, ranks) for x in arrays))
    np.testing.assert_array_equal(from_layout(ids, layout, ranks), chosen(*arrays, **options))
