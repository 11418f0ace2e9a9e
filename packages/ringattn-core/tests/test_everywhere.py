# SPDX-License-Identifier: Apache-2.0
"""Every function of core gives on every kind of mesh what it gives on one device, in every dtype; gradients too."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import (
    decode_attention,
    from_layout,
    halo,
    prefill_attention,
    ring_attention,
    shift,
    to_layout,
    write_cache,
)
from ringattn_core.errors import InputError

B, T, N, H, RANKS = 2, 8, 2, 4, 2
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ATTENTION = ("ring_attention", "prefill_attention", "decode_attention")
AT = jnp.array([[5, 1], [-1, 2]])
IDS = jnp.repeat(jnp.arange(2, dtype=jnp.int32), T // 2)[None].repeat(B, 0)

# Each function, of tokens that the ring splits, and of a few that its ranks share.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ring_attention": lambda x, _, ids, at, **ring: ring_attention(x, x, x, q_segment_ids=ids, causal=True, **ring),
    "prefill_attention": lambda x, _, ids, at, **ring: prefill_attention(x, x, x, T, send="keys", **ring),
    "decode_attention": lambda x, few, ids, at, **ring: decode_attention(few, x, x, T - 1, **ring),
    "shift": lambda x, _, ids, at, **ring: shift(x, 1, segment_ids=ids, **ring),
    "halo": lambda x, _, ids, at, **ring: halo(x, 2, **ring)[0],
    "write_cache": lambda x, few, ids, at, **ring: write_cache(x, few, at, **ring),
    "write_cache, rows alike": lambda x, few, ids, at, **ring: write_cache((x, x), (few, few), AT[0], **ring)[1],
    "to_layout": lambda x, _, ids, at, **ring: to_layout(x, "zigzag", RANKS, **ring),
    "from_layout": lambda x, _, ids, at, **ring: from_layout(x, "striped", RANKS, **ring),
}
# Each place: the kinds of the mesh axes beside the ring and of the ring, and how a call is made there.
PLACES = {
    "automatic": (AUTO, AUTO, "mesh"),
    "explicit": (EXPLICIT, EXPLICIT, "mesh"),
    "explicit rows": (EXPLICIT, AUTO, "mesh"),
    "explicit ring": (AUTO, EXPLICIT, "mesh"),
    "explicit rows, no ring": (EXPLICIT, EXPLICIT, "no ring"),
    "own shard_map": (AUTO, AUTO, "shard_map"),
    "own shard_map, not tracked": (AUTO, AUTO, "untracked"),
    "own shard_map, explicit rows": (EXPLICIT, AUTO, "ring only"),
    "pipeline": (AUTO, AUTO, "pipeline"),
    "explicit pipeline": (EXPLICIT, EXPLICIT, "pipeline"),
}
GLOBAL_ONLY, WITHOUT_EXPLICIT = ("to_layout", "from_layout"), ATTENTION
CASES = [
    (name, place)
    for name in FUNCTIONS
    for place, (*_, form) in PLACES.items()
    if not (name in GLOBAL_ONLY and form in ("shard_map", "untracked", "ring only"))
    and not (name in WITHOUT_EXPLICIT and form == "ring only")
]  # test_split.py tries what is left out: it raises


def in_place(name: str, place: str) -> tuple[Any, Callable[..., Any], tuple[P, ...]]:
    """The mesh, the function over it, of tokens, few tokens, ids and positions, and how these are split."""
    rows, ring, form = PLACES[place]
    mesh = jax.make_mesh((2, RANKS), ("data", "sp"), axis_types=(rows, ring), devices=jax.devices()[: 2 * RANKS])
    axis_name = () if form == "no ring" else "sp"
    tokens = P("data", None if form == "no ring" else "sp")
    few = P() if form in ("mesh", "no ring") else P("data")  # in these, what the ring does not split is not placed
    specs = (tokens, few, tokens, few)
    named = {"batch_axis_name": "data", "head_axis_name": ()} if name in ATTENTION else {}
    of = functools.partial(FUNCTIONS[name], axis_name=axis_name, **named)
    if form == "pipeline":
        stage = functools.partial(of, **({"batch_axis_name": ()} if name in ATTENTION else {}))
        return mesh, jax.shard_map(stage, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}), specs
    if form == "ring only":
        without = tuple(P(None, *spec[1:]) for spec in specs)
        return mesh, jax.shard_map(of, in_specs=without, out_specs=without[0], axis_names={"sp"}), specs
    if form in ("shard_map", "untracked"):
        out = P("data") if name == "decode_attention" else tokens
        return mesh, jax.shard_map(of, in_specs=specs, out_specs=out, check_vma=form == "shard_map"), specs
    return mesh, of, specs


def dtypes_in(name: str, place: str) -> tuple[str, str]:
    """Two dtypes: those of every other place."""
    even = [*PLACES].index(place) % 2 == 0
    if name in ATTENTION:
        return "bfloat16" if even else "float16", "float32"
    return ("bfloat16", "int32") if even else ("float16", "float32")


def graded(function: Callable[..., Any], name: str, dtypes: tuple[str, ...]) -> Callable[..., Any]:
    """The results of `function` in these dtypes, and the gradients of their sum with fixed weights, as one program."""

    def in_dtype(dtype: str, x: Any, few: Any, ids: Any, at: Any) -> Any:
        given = x.astype(dtype), few.astype(dtype)
        if dtype == "int32" or name == "decode_attention":
            return function(*given, ids, at)

        def loss(x: Any, few: Any) -> Any:
            out = function(x, few, ids, at)
            weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
            return (out.astype(jnp.float32) * weights).sum(), out

        gradients, out = jax.grad(loss, (0, 1), has_aux=True)(*given)
        return out, gradients

    return jax.jit(lambda *arrays: {dtype: in_dtype(dtype, *arrays) for dtype in dtypes})


DRAWN = [jax.random.normal(jax.random.key(n), (B, length, N, H)) * 4 for n, length in enumerate((T, 2))]


@functools.cache
def on_one_device(name: str) -> Any:
    dtypes = sorted({dtype for place in PLACES for dtype in dtypes_in(name, place)})
    return jax.tree.map(np.asarray, graded(FUNCTIONS[name], name, tuple(dtypes))(*DRAWN, IDS, AT))


@pytest.mark.parametrize(("name", "place"), CASES)
def test_results_and_gradients_are_those_of_one_device(name: str, place: str) -> None:
    mesh, function, specs = in_place(name, place)
    with jax.set_mesh(mesh):
        given = zip((*DRAWN, IDS, AT), specs, strict=True)
        arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in given]
        found = graded(function, name, dtypes_in(name, place))(*arrays)
    for dtype, results in found.items():
        # Helpers move values and round nothing; attention is held to the suite's bounds, of outputs up to about 4.
        atol = {"bfloat16": 0.06, "float16": 8e-3, "float32": 5e-5}[dtype] if name in ATTENTION else 0
        wanted = on_one_device(name)[dtype]
        for got, right in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
            assert got.dtype == right.dtype
            scale = max(1.0, float(np.abs(right.astype(np.float32)).max()))
            np.testing.assert_allclose(
                np.asarray(got, np.float32), right.astype(np.float32), 0, atol * scale, err_msg=dtype
            )


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_refuses_integers(name: str) -> None:
    x, few = (x.astype(jnp.int32) for x in DRAWN)
    with pytest.raises(InputError, match=r"has dtype int32\. Cast query, key and value"):
        FUNCTIONS[name](x, few, IDS, AT)
