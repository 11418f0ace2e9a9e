# SPDX-License-Identifier: Apache-2.0
"""Two functions of fused attention that take each query's first and last key: windows, chunks, ranges and documents."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import Backend, Feature, MaskInfo, from_flash, masks, ring_attention
from ringattn_core.backends.discovery import registered
from ringattn_core.contract.from_flash import FEATURES, FEATURES_OF_RANGES
from ringattn_core.errors import BackendLoadError, InputError, UnsupportedFeatureError
from ringattn_core.placement.layout import LAYOUTS
from ringattn_testing.flash import attended, delta_of, gradients
from ringattn_testing.rings import RINGS, close, drawn, graded, in_order_of, mesh_of
from ringattn_testing.traced_calls import forget_traced_calls

B, T, N, K = 2, 48, 4, 2
CALLS: list[tuple[int, int, bool]] = []
"""The queries and keys of each call in the programs traced so far, and whether it was causal."""


def within(q: Any, k: Any, first: Any, last: Any, causal: bool) -> Any:
    """Which keys queries see; and NaN for queries that break a promise about `first` and `last`, else 0."""
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    assert first.dtype == last.dtype == jnp.int32 and first.shape == last.shape
    assert first.shape in [(b, n, queries) for b in (1, batch) for n in (1, heads)]
    CALLS.append((queries, keys, causal))
    index = jnp.arange(keys).reshape(1, 1, 1, -1)
    seen = (first[..., None] <= index) & (index <= last[..., None])
    kept = ((first == keys) & (last == -1)) | ((first >= 0) & (first <= last) & (last < keys))
    if causal:
        kept &= (seen == jnp.tri(queries, keys, dtype=bool)[None, None]).all(-1)
    return seen, jnp.where(kept, 0.0, jnp.nan)


def forward(q: Any, k: Any, v: Any, *, scale: float, first: Any, last: Any, causal: bool) -> Any:
    seen, nan = within(q, k, first, last, causal)
    out, lse = attended(q, k, v, scale, seen)
    nothing = first > last  # results that nobody may read
    return jnp.where(nothing.swapaxes(1, 2)[..., None], jnp.nan, out), jnp.where(nothing, jnp.nan, lse) + nan


def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, scale: float, first: Any, last: Any) -> Any:
    return with_delta(q, k, v, out, lse, dout, scale=scale, first=first, last=last, delta=delta_of(out, dout))


def with_delta(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *, scale: float, first: Any, last: Any, delta: Any
) -> Any:
    seen, nan = within(q, k, first, last, False)
    return gradients(q, k, v, lse, dout, delta + nan, scale, seen)


ALL = FEATURES | FEATURES_OF_RANGES


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    CALLS.clear()
    ranges = Backend("ranges", 1, ("cpu",), ALL, kernel="nowhere:KERNEL")
    with_lse = Backend("with_lse", 1, ("cpu",), ALL | {Feature.RETURN_LSE}, kernel="nowhere:KERNEL")
    with registered(ranges, from_flash(forward, backward)), registered(with_lse, from_flash(forward, with_delta)):
        yield


OPERANDS = [*drawn((B, T, N, 8), (B, T, K, 8), (B, T, K, 6)), jnp.linspace(-1, 2, N)]
INDEX = np.arange(T, dtype=np.int32)


def drawn_range(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last position of each query, at random. Some are empty, some begin or end far outside."""
    first, last = np.sort(np.random.default_rng(3).integers(-5, T + 5, (2, *shape)), 0).astype(np.int32)
    last[..., ::7] = first[..., ::7] - 1
    first[..., 3::7], last[..., 5::7] = -(2**31), 2**31 - 1
    return first, last


DOCUMENTS = np.repeat([[0, 1, 2, -1], [5, 9, 9, 9]], T // 4, 1).astype(np.int32)
SCATTERED = np.random.default_rng(5).integers(-1, 4, (B, T)).astype(np.int32)
PREFIXES = MaskInfo.from_prefixes(np.array([20, 7]), T).kv_range
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True}, "full": {}, "window": {"causal": True, "sliding_window": 9},
    "two sides": {"sliding_window": (3, 17)}, "chunks": {"chunk_size": 7}, "prefixes": {"kv_range": PREFIXES},
    "by row": {"kv_range": drawn_range(B, T)}, "by head": {"kv_range": drawn_range(1, N, T), "causal": True},
    "by row and head": {"kv_range": drawn_range(B, N, T)},
    "documents": {"causal": True, "q_segment_ids": DOCUMENTS}, "scattered ids": {"q_segment_ids": SCATTERED},
    "ids, by head": {"kv_range": drawn_range(B, N, T), "q_segment_ids": SCATTERED, "causal": True},
    "ids, window": {"sliding_window": (11, 4), "q_segment_ids": SCATTERED, "softmax_scale": 0.3},
}  # fmt: skip
OF_QUERIES = {"q_segment_ids": 1, "kv_range": 1}


def ring(name: str, ranks: int, layout: str, mask: dict[str, Any], kind: Any = AxisType.Auto, **options: Any) -> Any:
    """The result and gradients of a ring, of arrays in natural order."""
    static = {n: x for n, x in mask.items() if n not in OF_QUERIES} | options
    over = {"mesh": mesh_of(kind, sp=ranks), "axis_name": "sp"} if "mesh" not in options else {}
    # Tokens first, so that `in_order_of` moves the axis that it moves of queries.
    ends = [jnp.moveaxis(jnp.asarray(x), -1, 1) for x in mask.get("kv_range", ())]
    ids = {n: jnp.asarray(x) for n, x in mask.items() if n == "q_segment_ids"}

    def natural(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        def attend(moved: Any) -> Any:
            q, k, v, ends, ids = moved
            ranges = {"kv_range": tuple(jnp.moveaxis(x, 1, -1) for x in ends)} if ends else {}
            return ring_attention(q, k, v, sinks, backend=name, layout=layout, **over, **ranges, **ids, **static)

        out = in_order_of(layout, ranks, lambda *moved: first_of(attend(moved)))(q, k, v, ends, ids)
        return out

    return graded(natural, *OPERANDS)


def first_of(result: Any) -> Any:
    """The output, which gets a share of the log-sum-exp where the call returns that too."""
    if not isinstance(result, tuple):
        return result
    out, lse = result
    return out + jnp.where(jnp.isinf(lse), 0, 0.1 * lse).swapaxes(1, 2)[..., None]


@functools.cache
def wanted(mask: str, with_lse: bool = False) -> Any:
    options = {"return_lse": True} if with_lse else {}
    return graded(lambda *x: first_of(ring_attention(*x, backend="xla", **MASKS[mask], **options)), *OPERANDS)


# The layout decides only where the ends of windows and ranges lie, so the other masks take one layout each.
IN_EVERY_LAYOUT = ("causal", "window", "two sides", "by row and head")
CASES = [*itertools.product(IN_EVERY_LAYOUT, LAYOUTS)]
CASES += zip([name for name in MASKS if name not in IN_EVERY_LAYOUT], itertools.cycle(LAYOUTS), strict=False)


@pytest.mark.parametrize(("mask", "layout"), CASES)
def test_every_mask_of_intervals_is_exact(mask: str, layout: str) -> None:
    close(ring("ranges", 3, layout, MASKS[mask]), wanted(mask), 5e-5)


@pytest.mark.parametrize(("ranks", "layout", "kind"), RINGS)
def test_rings_of_every_size_give_the_results_of_one_device(ranks: int, layout: str, kind: AxisType) -> None:
    mask = {1: "ids, by head", 2: "by row and head", 3: "documents", 4: "ids, window", 8: "window"}[ranks]
    got = ring("with_lse", ranks, layout, MASKS[mask], kind, return_lse=True)
    close(got, wanted(mask, with_lse=True), 5e-5)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        ("documents", {"strategy": "all_gather"}), ("window", {"strategy": "all_gather", "layout": "striped"}),
        ("documents", {"balance": "zigzag"}), ("window", {"balance": "zigzag"}),
        ("documents", {"strategy": "ulysses"}),
        ("documents", {"strategy": "ulysses", "layout": "striped", "axes": {"a": 2, "b": 2}}),
        ("window", {"strategy": "ulysses", "layout": "zigzag", "axes": {"a": 4, "b": 2}}),
        ("window", {"max_distance": T}),
    ],
    ids=str,
)  # fmt: skip
def test_other_strategies_have_the_same_results(mask: str, options: dict[str, Any]) -> None:
    sizes, layout = options.get("axes", {"sp": 4}), options.get("layout", "contiguous")
    kept = {n: x for n, x in options.items() if n not in ("axes", "layout")}
    over = {"mesh": mesh_of(**sizes), "axis_name": tuple(sizes)}
    got = ring("ranges", int(np.prod([*sizes.values()])), layout, MASKS[mask], **over, **kept)
    close(got, wanted(mask), 5e-5)


def test_a_block_is_one_call_and_only_own_keys_under_a_plain_causal_mask_are_causal() -> None:
    for mask, causal in (("causal", {True, False}), ("window", {False}), ("by row", {False}), ("documents", {False})):
        CALLS.clear()
        forget_traced_calls()  # functions are called where a call is traced
        for layout in ("contiguous", "zigzag", "striped"):
            jax.eval_shape(lambda layout=layout, mask=mask: ring("ranges", 3, layout, MASKS[mask]))
        assert {each[:2] for each in CALLS if each[1] == T // 3} == {(T // 3, T // 3)}
        assert {each[2] for each in CALLS} == causal


def test_lengths_may_differ_and_need_no_multiple() -> None:
    q, (_, k, v, sinks) = OPERANDS[0][:, :29], OPERANDS
    for options in ({"causal": True}, {"sliding_window": (5, 30)}):
        call = functools.partial(ring_attention, **options)
        mine = functools.partial(call, backend="ranges", mesh=mesh_of(sp=4), axis_name="sp")
        close(
            *(graded(f, q, k[:, :45], v[:, :45], sinks) for f in (mine, functools.partial(call, backend="xla"))), 5e-5
        )


def test_latents_travel_and_examples_of_a_vmap_have_ranges_of_their_own() -> None:
    q, x, w = drawn((2, B, T, N, 8), (2, B, T, 6), (6, 2, K, 8))
    ends = [jnp.asarray(np.stack([x, x[::-1]])) for x in drawn_range(B, T)]

    def expand(x: Any, w: Any) -> Any:
        both = jnp.einsum("bsl,lpkh->pbskh", x, w)
        return both[0], both[1]

    def attend(backend: str, **over: Any) -> Any:
        def one(q: Any, x: Any, w: Any, *ends: Any) -> Any:
            return ring_attention(q, x, expand=expand, expand_params=w, kv_range=ends, backend=backend, **over)

        return graded(lambda q, x, w: jax.vmap(one, (0, 0, None, 0, 0))(q, x, w, *ends), q, x, w)

    close(attend("ranges", mesh=mesh_of(sp=4), axis_name="sp"), attend("xla"), 5e-5)


def test_a_shard_map_of_the_callers_own_checks_the_axes_of_ids_and_ranges() -> None:
    tokens, mesh = P(None, "sp"), mesh_of(sp=4)
    q, k, v, _ = OPERANDS
    ids, (first, last) = jnp.asarray(SCATTERED), map(jnp.asarray, drawn_range(B, T))

    def local(q: Any, k: Any, v: Any, ids: Any, first: Any, last: Any) -> Any:
        options = {"q_segment_ids": ids, "kv_range": (first, last), "causal": True}
        return ring_attention(q, k, v, axis_name="sp", backend="ranges", **options)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 6, out_specs=tokens)
    options = {"q_segment_ids": ids, "kv_range": (first, last), "causal": True}
    got = graded(lambda *x: sharded(*x, ids, first, last), q, k, v)
    close(got, graded(lambda *x: ring_attention(*x, backend="xla", **options), q, k, v), 5e-5)


def test_masks_that_may_be_no_intervals_are_refused() -> None:
    for option in ({"attention_mask": jnp.ones((1, 1, T, T), bool)}, {"mask_builder": lambda *_: masks.Causal()}):
        with pytest.raises(UnsupportedFeatureError, match="'ranges' does not support"):
            ring_attention(*OPERANDS, backend="ranges", **option)
    beyond = Backend("beyond", 1, ("cpu",), {*ALL, Feature.MASK_BUILDER, Feature.POSITIONS}, kernel="nowhere:KERNEL")
    with (
        registered(beyond, from_flash(forward, backward)),
        pytest.raises(BackendLoadError, match="declares MASK_BUILDER, POSITIONS, which its kernel cannot have"),
    ):
        ring_attention(*OPERANDS, backend="beyond")


def test_both_functions_take_both_ends_or_neither() -> None:
    def first_alone(q: Any, k: Any, v: Any, *, scale: float, first: Any) -> Any: ...

    for pair in ((forward, lambda *_, causal: 0), (first_alone, backward)):
        with pytest.raises(InputError, match="Give both functions both parameters, or neither"):
            from_flash(*pair)
