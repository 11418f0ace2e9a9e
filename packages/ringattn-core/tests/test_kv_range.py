# SPDX-License-Identifier: Apache-2.0
"""`kv_range`: a query sees the keys between two positions of its own, on every ring, layout, strategy and mesh."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import MaskInfo, decode_attention, prefill_attention, ring_attention
from ringattn_core.errors import InputError
from ringattn_core.masks import Causal, Document, Local, Predicate, Prefix
from ringattn_testing.rings import RINGS, close, drawn, graded, in_order_of, masked, mesh_of, query_key_value

B, T, N, K = 2, 48, 4, 2
LEAST, MOST = -(2**31), 2**31 - 1
OPERANDS = query_key_value(B, T, N, K)
INDEX = np.arange(T, dtype=np.int32)


def drawn_range(*shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last position of each query, at random. Some are empty, some begin or end far outside."""
    rng = np.random.default_rng(seed)
    first, last = np.sort(rng.integers(-5, T + 5, (2, *shape)), 0).astype(np.int32)
    last[..., ::7] = first[..., ::7] - 1
    first[..., 3::7], last[..., 5::7] = LEAST, MOST
    return first, last


RANGES = {
    "one for all": drawn_range(T), "by row": drawn_range(B, T), "by head": drawn_range(1, N, T),
    "by row and head": drawn_range(B, N, T), "rows and a number": (drawn_range(B, T)[0], 40),
    "two numbers": (np.int32(5), 30),
    "ends of other shapes": (drawn_range(B, 1, T)[0], drawn_range(1, N, T, seed=1)[1]),
}  # fmt: skip


def dense(kv_range: Any, keys: int = T) -> jax.Array:
    """The range as a dense mask, `[B, N, T, S]`."""
    first, last = (np.broadcast_to(x, (T,)) if np.ndim(x) == 0 else np.asarray(x) for x in kv_range)
    first, last = (x[:, None] if x.ndim == 2 else x[None, None] if x.ndim == 1 else x for x in (first, last))
    columns = np.arange(keys)
    return jnp.broadcast_to((first[..., None] <= columns) & (columns <= last[..., None]), (B, N, T, keys))


@pytest.mark.parametrize("name", RANGES)
def test_a_range_is_the_mask_of_its_keys(name: str) -> None:
    kv_range = RANGES[name]
    got = graded(lambda *x: ring_attention(*x, kv_range=kv_range, return_lse=True), *OPERANDS)
    close(got, masked(dense(kv_range), *OPERANDS, return_lse=True))


@pytest.mark.parametrize(("ranks", "layout", "kind"), RINGS)
def test_every_ring_and_layout_gives_the_result_of_one_device(ranks: int, layout: str, kind: AxisType) -> None:
    mesh, kv_range = mesh_of(kind, sp=ranks), [x[:, :, None] for x in drawn_range(B, T)]
    options: dict[str, Any] = {"causal": ranks != 3, "sliding_window": None if ranks < 4 else (30, None)}

    def ring(q: Any, k: Any, v: Any, first: Any, last: Any) -> Any:
        ends = (first[..., 0], last[..., 0])
        return ring_attention(q, k, v, kv_range=ends, mesh=mesh, axis_name="sp", layout=layout, **options)

    moved = in_order_of(layout, ranks, ring)
    got = graded(lambda *x: moved(*x, *map(jnp.asarray, kv_range)), *OPERANDS)
    mask = dense([x[..., 0] for x in kv_range])
    close(got, masked(mask, *OPERANDS, **options), atol=5e-5)


OF_THE_RING = {"strategy", "layout", "balance", "max_distance"}
OTHERS: dict[str, dict[str, Any]] = {
    "all-gather": {"strategy": "all_gather"},
    "ulysses": {"strategy": "ulysses"},
    "ulysses in zigzag order": {"strategy": "ulysses", "layout": "zigzag"},
    "balance": {"balance": "zigzag", "causal": True},
    "promise": {"max_distance": 60},
    "offset": {"causal": True, "query_offset": 3},
    "segments, sinks, soft cap and dropout": {
        "q_segment_ids": jnp.asarray(np.repeat([[0, 1, 2, -1]], T // 4, 1).repeat(B, 0)), "softmax_aux": jnp.ones(N),
        "logits_soft_cap": 4.0, "dropout_prob": 0.2, "dropout_seed": 3,
    },
    "positions": {"q_positions": jnp.asarray(INDEX[::-1].copy()), "causal": True},
    "mask that is an interval": {"mask_builder": lambda *_: Local(9, 4)},
    "mask that is none": {"mask_builder": lambda *_: Predicate(lambda i, j: (i + j) % 3 > 0)},
}  # fmt: skip


@pytest.mark.parametrize(("option", "name"), [*zip(OTHERS, itertools.cycle(["by row", "by head"]))])
def test_a_range_goes_with_every_other_option(option: str, name: str) -> None:
    options, kv_range = OTHERS[option], RANGES[name]
    mask = dense(kv_range)[..., :: -1 if "q_positions" in options else 1]  # ranges compare positions
    # Options that decide on sends need four ranks, others two.
    layout, ranks = options.get("layout", "contiguous"), 4 if OF_THE_RING & options.keys() else 2
    placed = {"mesh": mesh_of(sp=ranks), "axis_name": "sp"}
    first, last = (x[:, None] if x.ndim == 2 else x for x in map(jnp.asarray, kv_range))
    ends = [jnp.swapaxes(x, 1, 2) for x in (first, last)]

    def ring(q: Any, k: Any, v: Any, first: Any, last: Any) -> Any:
        return ring_attention(q, k, v, kv_range=(first.swapaxes(1, 2), last.swapaxes(1, 2)), **placed, **options)

    moved = in_order_of(layout, ranks, ring)
    got = graded(lambda *x: moved(*x, *ends), *OPERANDS)
    alone = {n: x for n, x in options.items() if n not in OF_THE_RING}
    close(got, masked(mask, *OPERANDS, **alone), atol=5e-5)


def test_an_axis_of_heads_and_of_rows_splits_ranges_like_queries() -> None:
    mesh, kv_range = mesh_of(AxisType.Explicit, data=2, sp=2, tp=2), RANGES["by row and head"]
    got = graded(lambda *x: ring_attention(*x, kv_range=kv_range, mesh=mesh, axis_name="sp"), *OPERANDS)
    close(got, masked(dense(kv_range), *OPERANDS), atol=5e-5)


def test_ranges_may_be_traced_vmapped_and_local() -> None:
    first, last = (np.stack([x, x[::-1]]) for x in RANGES["by row"])
    twice = [jnp.stack([x, 2 * x]) for x in OPERANDS]
    got = jax.vmap(lambda q, k, v, *ends: ring_attention(q, k, v, kv_range=ends))(*twice, first, last)
    for i in range(2):
        close(got[i], ring_attention(*(x[i] for x in twice), attention_mask=dense((first[i], last[i]))))
    mesh, tokens = mesh_of(sp=4), P(None, "sp")
    local = jax.shard_map(
        lambda q, k, v, *ends: ring_attention(q, k, v, kv_range=ends, axis_name="sp"),
        mesh=mesh, in_specs=(tokens,) * 5, out_specs=tokens,
    )  # fmt: skip
    close(local(*OPERANDS, *RANGES["by row"]), ring_attention(*OPERANDS, attention_mask=dense(RANGES["by row"])))


def test_lengths_that_no_ring_divides_are_padded() -> None:
    q, k, v = (x[:, :45] for x in OPERANDS)
    ends = [x[:, :45] for x in RANGES["by row"]]
    got = ring_attention(q, k, v, kv_range=ends, mesh=mesh_of(sp=4), axis_name="sp")
    mask = dense(RANGES["by row"])[:, :, :45, :45]
    close(got, ring_attention(q, k, v, attention_mask=mask))


def test_latents_travel_with_ranges() -> None:
    q, x, w = drawn((B, T, N, 8), (B, T, 6), (6, 2, K, 8))

    def expand(x: Any, w: Any) -> Any:
        both = jnp.einsum("bsl,lpkh->pbskh", x, w)
        return both[0], both[1]

    options = {"kv_range": RANGES["by row"]}
    ring = {"mesh": mesh_of(sp=4), "axis_name": "sp"}
    got = graded(lambda q, x, w: ring_attention(q, x, expand=expand, expand_params=w, **options, **ring), q, x, w)
    close(got, graded(lambda q, x, w: ring_attention(q, *expand(x, w), **options), q, x, w), atol=5e-5)


@pytest.mark.parametrize("kind", ["decode", "queries", "keys"])
def test_a_cache_is_seen_within_ranges(kind: str) -> None:
    tokens, lengths = 8, jnp.asarray([40, 33])
    q, (_, k, v) = drawn((B, tokens, N, 8))[0], OPERANDS
    first, last = (jnp.asarray(x[:, :tokens]) for x in drawn_range(B, T, seed=5))
    more = {} if kind == "decode" else {"send": kind}
    attend: Any = decode_attention if kind == "decode" else prefill_attention
    got = attend(q, k, v, lengths, kv_range=(first, last), mesh=mesh_of(sp=4), axis_name="sp", **more)
    at = lengths[:, None] - tokens + jnp.arange(tokens)[None]
    mask = (first[..., None] <= INDEX[None, None]) & (jnp.minimum(last, at)[..., None] >= INDEX[None, None])
    close(got, ring_attention(q, k, v, attention_mask=mask[:, None]))


@pytest.mark.parametrize("traced", [False, True])
def test_spans_and_prefixes_see_both_ways_and_else_causally(traced: bool) -> None:
    ids = np.array([[-1] * 5 + [0] * 7 + [1] * 8 + [-1] * 20 + [0] * 8, [3] * 10 + [-1] * 38], np.int32)
    make = jax.jit(MaskInfo.from_spans, static_argnums=1) if traced else MaskInfo.from_spans
    runs = np.cumsum(np.diff(ids, prepend=ids[:, :1]) != 0, 1)
    together = (runs[:, :, None] == runs[:, None]) & (ids >= 0)[:, :, None]
    i, j = INDEX[:, None], INDEX[None]
    for window, causal in ((None, j <= i), (6, (j <= i) & (i - 6 <= j))):
        info = make(jnp.asarray(ids), window)
        wanted = ring_attention(*OPERANDS, attention_mask=jnp.asarray((together | causal)[:, None]))
        close(ring_attention(*OPERANDS, mask_info=info), wanted)
        close(ring_attention(*OPERANDS, mask_info=info, mesh=mesh_of(sp=4), axis_name="sp"), wanted)
    lengths = np.array([7, 0])
    info = MaskInfo.from_prefixes(lengths, T)
    wanted = (j <= i) | (j < lengths[:, None, None]) & (i < lengths[:, None, None])
    close(ring_attention(*OPERANDS, mask_info=info), ring_attention(*OPERANDS, attention_mask=wanted[:, None]))
    assert info.specs("data", "sp").kv_range == (P(("data",), ("sp",)),) * 2


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_spans_may_be_made_from_ids_that_a_mesh_splits(kind: AxisType) -> None:
    mesh, ids = mesh_of(kind, data=2, sp=4), np.repeat([[-1, 0, 1, -1, 0, 0]] * B, T // 6, 1)
    placed = jax.device_put(jnp.asarray(ids), NamedSharding(mesh, P("data", "sp")))
    for make in (MaskInfo.from_spans, jax.jit(MaskInfo.from_spans)):
        got, wanted = (make(x).kv_range for x in (placed, ids))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
        close(
            ring_attention(*OPERANDS, mask_info=MaskInfo(kv_range=got), mesh=mesh, axis_name="sp"),
            ring_attention(*OPERANDS, mask_info=MaskInfo(kv_range=wanted)),
        )


def arrays_of_the_square(program: Any, size: int) -> list[str]:
    """The arrays of at least `size` elements that a traced program computes, inner programs included."""
    found = []
    for equation in program.eqns:
        found += [str(x.aval) for x in equation.outvars if getattr(x.aval, "size", 0) >= size]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += arrays_of_the_square(inner, size) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize(
    "mask",
    [
        Causal() & Local(100, None), Prefix(37) | Causal(), Document(np.arange(8192) // 300),
        Causal() & Document(np.arange(8192) // 300), Local(5, 0) | Document(np.arange(8192) // 300),
    ],
    ids=repr,
)  # fmt: skip
def test_masks_that_are_intervals_take_no_memory_of_the_square(mask: Any) -> None:
    operands = query_key_value(1, 8192, 1, 1, 4)

    def loss(*x: Any) -> Any:
        return ring_attention(*x, mask_builder=lambda *_: mask, backend="xla").sum()

    assert not arrays_of_the_square(jax.make_jaxpr(jax.grad(loss))(*operands).jaxpr, 8192 * 8192 // 32)
    loose = jax.make_jaxpr(lambda *x: ring_attention(*x, mask_builder=lambda *_: Predicate(lambda i, j: i != j)))
    assert arrays_of_the_square(loose(*operands).jaxpr, 8192 * 8192 // 32), "the test must find the bits of a predicate"


@pytest.mark.parametrize(
    ("kv_range", "message"),
    [
        ((INDEX, None), "lacks an end"), (INDEX, "got ndarray"), ((INDEX,) * 3, "got 3 ends"), ((), "got tuple"),
        ((INDEX * 1.0, INDEX), "has dtype float64"), ((INDEX[:9], INDEX), "has an end of shape"),
        ((np.zeros((3, T), int), INDEX), "has an end of shape"), ((np.zeros((1, 1, 1, T), int), INDEX), "has an end"),
        ((np.full(T, 2**31), INDEX), "has the value 2147483648"), ((True, INDEX), "has dtype bool"),
    ],
)  # fmt: skip
def test_a_wrong_range_is_refused(kv_range: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ring_attention(*OPERANDS, kv_range=kv_range)
