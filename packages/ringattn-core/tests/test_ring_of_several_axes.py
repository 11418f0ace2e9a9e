# SPDX-License-Identifier: Apache-2.0
"""Promises of a ring over a tuple of mesh axes: the order of the names decides which rank holds which tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from ringattn_core import from_layout, ring_attention, to_layout

LENGTH = 32
CASES = [
    # form, order of the names, shape of the mesh, options
    ("mesh", ("b", "a"), (2, 2), dict(causal=True, layout="zigzag", ids=True)),
    ("shard_map", ("b", "a"), (2, 2), dict(causal=True, layout="zigzag", ids=True)),
    ("mesh", ("b", "a"), (2, 4), dict(sliding_window=5, dropout_prob=0.3, dropout_seed=7)),
    ("shard_map", ("b", "a"), (4, 2), dict(causal=True, ids=True)),
    ("mesh", ("a", "b"), (2, 4), dict(causal=True, ids=True)),
    ("shard_map", ("a", "b"), (2, 2), dict(causal=True, ids=True)),
]


def arrays() -> tuple[jax.Array, ...]:
    return tuple(jax.random.normal(jax.random.key(n), (1, LENGTH, 2, 4)) for n in range(4))


def segment_ids() -> jax.Array:
    return jnp.asarray(np.repeat([0, 1, 2, -1], [13, 9, 7, 3])[None], jnp.int32)


def differentiated(attend: Any, q: Any, k: Any, v: Any, dout: Any) -> list[np.ndarray]:
    """The output, and the gradients of query, key and value."""
    out, pullback = jax.vjp(attend, q, k, v)
    return [np.asarray(x) for x in (out, *pullback(dout))]


def on_one_device(ranks: int, layout: str, **options: Any) -> list[np.ndarray]:
    q, k, v, dout = arrays()

    def attend(q: Any, k: Any, v: Any) -> Any:
        natural = (from_layout(x, layout, ranks, axis=1) for x in (q, k, v))
        ids = options.get("q_segment_ids")
        given = options if ids is None else options | {"q_segment_ids": from_layout(ids, layout, ranks, axis=1)}
        return to_layout(ring_attention(*natural, **given), layout, ranks, axis=1)

    return differentiated(attend, q, k, v, dout)


@pytest.mark.parametrize(("form", "order", "shape", "options"), CASES, ids=str)
def test_the_order_of_the_names_decides_and_not_that_of_the_mesh(
    form: str, order: tuple[str, str], shape: tuple[int, int], options: dict[str, Any]
) -> None:
    ranks = shape[0] * shape[1]
    mesh = Mesh(np.array(jax.devices()[:ranks]).reshape(shape), ("a", "b"))
    options = dict(options)
    ids = {"q_segment_ids": segment_ids()} if options.pop("ids", False) else {}
    layout = options.pop("layout", "contiguous")
    spec = PartitionSpec(None, order)
    given: dict[str, Any] = options | {"axis_name": order, "layout": layout}
    if form == "mesh":

        def attend(q: Any, k: Any, v: Any) -> Any:
            return ring_attention(q, k, v, mesh=mesh, **ids, **given)
    else:

        def local(q: Any, k: Any, v: Any, *ids: Any) -> Any:
            return ring_attention(q, k, v, **dict(zip(("q_segment_ids",), ids, strict=False)), **given)

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(q, k, v, *ids.values())

    want = on_one_device(ranks, layout, **options, **ids)
    got = differentiated(jax.jit(attend), *arrays())
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5, err_msg=name)
