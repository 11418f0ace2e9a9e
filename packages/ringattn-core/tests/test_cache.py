# SPDX-License-Identifier: Apache-2.0
"""`decode_attention` and `prefill_attention` equal dense attention to the filled part of a cache, and send little."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import (
    Backend,
    Feature,
    decode_attention,
    from_layout,
    prefill_attention,
    ring_attention,
    to_layout,
)  # fmt: skip
from ringattn_core.backends import discovery
from ringattn_core.call.cache import bytes_to_send
from ringattn_core.call.validation import validated
from ringattn_core.errors import DerivativeError, InputError, MeshError
from ringattn_core.strategies import cache
from ringattn_testing.rings import close, drawn, graded, mesh_of
from ringattn_testing.traced_calls import forget_traced_calls
from ringattn_xla.block import KERNEL as XLA

B, T, S, N, K, H, HV = 2, 24, 48, 4, 2, 8, 6
CHUNK, KEY, VALUE = drawn((B, T, N, H), (B, S, K, H), (B, S, K, HV))
NEW = CHUNK[:, :2]
"""The queries of a step of decoding; `CHUNK` has the queries of prefill."""
LENGTHS = np.array([37, 20])  # the second row has fewer tokens than `CHUNK`: the first four queries there see nothing
SINKS, SLOPES = jnp.linspace(-1.0, 1.0, N), jnp.linspace(0.1, 0.5, N)
OPTIONS: dict[str, Any] = {"softmax_aux": SINKS, "sliding_window": (13, 0), "alibi_slopes": SLOPES}
SPLIT = P(None, "sp")


def over(**options: Any) -> dict[str, Any]:
    """The options of a call over a ring of 4, with others."""
    return {"mesh": mesh_of(sp=4), "axis_name": "sp", "return_lse": True} | options


def expected(query: Any, lengths: Any = LENGTHS, key: Any = KEY, value: Any = VALUE, **options: Any) -> Any:
    """Output and log-sum-exp of the call on one device that has the positions of queries, and the whole cache."""
    positions = np.asarray(lengths)[:, None] - query.shape[1] + np.arange(query.shape[1])
    options |= {
        "causal": True,
        "q_positions": positions,
        "kv_positions": np.arange(S),
        "return_lse": True,
        "backend": "xla",
    }
    return ring_attention(query, key, value, **options)


def agrees(got: Any, wanted: Any, layout: str = "contiguous", ranks: int = 1) -> None:
    close((from_layout(got[0], layout, ranks), from_layout(got[1], layout, ranks, axis=2)), wanted)


class TestDecoding:
    @pytest.mark.parametrize(("options", "keys", "most", "count"), [({}, 2, 256, 12), (OPTIONS, 4, 20, 4)])
    def test_a_cache_that_is_cut_into_chunks_gives_the_same(
        self, options: dict[str, Any], keys: int, most: int, count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cache, "SHORTEST_CHUNK", keys)
        monkeypatch.setattr(cache, "MOST_CHUNKS", most)
        forget_traced_calls()
        seen = []
        chunked = cache._chunked
        monkeypatch.setattr(cache, "_chunked", lambda block, count: seen.append(count) or chunked(block, count))
        got = decode_attention(NEW, KEY, VALUE, LENGTHS, **over(mesh=mesh_of(sp=2)), **options)
        agrees(got, expected(NEW, **options))
        assert seen == [count]
        forget_traced_calls()

    def test_a_kernel_reads_each_key_once_for_all_heads_of_a_group_and_is_told_that_positions_grow(self) -> None:
        rows = []

        class Kernel:
            def forward(self, block: Any, partial: Any) -> Any:
                assert block.monotone  # so that it needs no list of the tiles to visit
                rows.append((block.q.shape, block.k.shape))
                return XLA.forward(block, partial)

            def backward(self, *_: Any) -> Any:
                raise AssertionError

        mine = Backend("mine", 1, ("cpu",), frozenset(Feature), kernel="gone:KERNEL")
        with discovery.registered(mine, Kernel()):
            for options in ({}, {"alibi_slopes": SLOPES}):
                got = decode_attention(NEW, KEY, VALUE, LENGTHS, backend="mine", return_lse=True, **options)
                agrees(got, expected(NEW, **options))
        assert rows == [((B, 2 * N // K, K, H), (B, S, K, H)), ((B, 2, N, H), (B, S, K, H))]

    def test_a_kernel_for_few_queries_gets_them_as_they_are_and_begins_from_sinks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blocks = []

        class Kernel:
            few_queries = 2 * N // K

            def forward(self, block: Any, partial: Any) -> Any:
                blocks.append((block.q.shape, block.k.shape, block.final, partial is not None))
                return XLA.forward(block, partial)

            def backward(self, *_: Any) -> Any:
                raise AssertionError

        mine = Backend("mine", 1, ("cpu",), frozenset(Feature), kernel="gone:KERNEL")
        with discovery.registered(mine, Kernel()):
            for options in ({}, {"softmax_aux": SINKS}):
                got = decode_attention(NEW, KEY, VALUE, LENGTHS, backend="mine", return_lse=True, **options)
                agrees(got, expected(NEW, **options))
            monkeypatch.setattr(Kernel, "few_queries", 2 * N // K - 1)
            decode_attention(NEW, KEY, VALUE, LENGTHS, backend="mine", sliding_window=7)
        assert blocks[:2] == [((B, 2, N, H), (B, S, K, H), True, sinks) for sinks in (False, True)]
        assert [q for q, *_ in blocks[2:]] == [(B, 2 * N // K, K, H)], "more queries are rows, as for other kernels"

    def test_on_one_device_it_needs_no_mesh_and_takes_one_length_for_all_rows(self) -> None:
        out, lse = decode_attention(NEW[:, :1], KEY, VALUE, 9, return_lse=True)
        agrees((out, lse), expected(NEW[:, :1], [9] * B))
        np.testing.assert_array_equal(decode_attention(NEW[:, :1], KEY, VALUE, 9), out)

    def test_batch_and_heads_may_be_split_too(self) -> None:
        mesh, wanted = mesh_of(dp=2, sp=2, tp=2), expected(NEW, softmax_aux=SINKS, alibi_slopes=SLOPES)
        options = {"softmax_aux": SINKS, "alibi_slopes": SLOPES}
        agrees(decode_attention(NEW, KEY, VALUE, LENGTHS, **over(mesh=mesh), **options), wanted)

        def local(query: Any, key: Any, value: Any, slopes: Any) -> Any:
            named = {"axis_name": "sp", "head_axis_name": "tp", "batch_axis_name": (), "return_lse": True}
            return decode_attention(query, key, value, LENGTHS, SINKS, alibi_slopes=slopes, **named)

        heads, kept = P(None, None, "tp"), P(None, "sp", "tp")
        specs = (heads, kept, kept, P("tp"))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(heads, P(None, "tp")))
        agrees(jax.jit(mapped)(NEW, KEY, VALUE, SLOPES), wanted)

    def test_rows_without_tokens_are_zero_and_what_lies_beyond_the_length_is_not_seen(self) -> None:
        for lengths in ([0, 20], [1, 20]):
            beyond = jnp.arange(S)[None, :, None, None] >= np.array(lengths)[:, None, None, None]
            key, value = (jnp.where(beyond, 1e30, x) for x in (KEY, VALUE))
            out, lse = decode_attention(NEW, key, value, jnp.array(lengths), **over())
            agrees((out, lse), expected(NEW, lengths))
            assert (out[0, 0] == 0).all() and jnp.isneginf(lse[0, :, 0]).all()
            assert (out[0, 1] != 0).all() == (lengths[0] == 1)

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_the_mesh_may_be_that_of_the_context_or_of_the_arrays(self, kind: AxisType) -> None:
        mesh = mesh_of(kind, sp=2, tp=2)
        step = functools.partial(decode_attention, softmax_aux=SINKS, axis_name="sp", return_lse=True)
        wanted = expected(NEW, softmax_aux=SINKS)
        with jax.set_mesh(mesh):
            agrees(jax.jit(step)(NEW, KEY, VALUE, jnp.asarray(LENGTHS)), wanted)
            agrees(step(NEW, KEY, VALUE, LENGTHS), wanted)
        if kind == AxisType.Explicit:
            key, value = (jax.device_put(x, jax.NamedSharding(mesh, P(None, "sp", "tp"))) for x in (KEY, VALUE))
            agrees(step(NEW, key, value, LENGTHS), wanted)

    def test_a_vmapped_call_is_that_of_each_example(self) -> None:
        lengths = jnp.stack([jnp.asarray(LENGTHS), jnp.asarray(LENGTHS) - 3])
        out, lse = jax.vmap(lambda length: decode_attention(NEW, KEY, VALUE, length, **over()))(lengths)
        for number in range(2):
            agrees((out[number], lse[number]), expected(NEW, lengths[number]))

    def test_no_key_travels(self) -> None:
        mesh = mesh_of(sp=8)
        kept = jax.NamedSharding(mesh, SPLIT)
        program = jax.jit(lambda *x: decode_attention(*x, **over(mesh=mesh)), in_shardings=(None, kept, kept, None))
        text = program.lower(NEW, KEY, VALUE, LENGTHS).compile().as_text() or ""
        assert "collective-permute" not in text and "all-gather" not in text and "all-to-all" not in text
        sent = re.findall(r"f32\[([\d,]+)\]\S* all-reduce", text) + re.findall(r"all-reduce\(f32\[([\d,]+)\]", text)
        assert len(sent) == 1
        assert np.prod([int(n) for n in sent[0].split(",")]) == 8 * B * 2 * N * (HV + 1)


class TestPrefill:
    @pytest.mark.parametrize("send", ["keys", "queries"])
    def test_batch_and_heads_may_be_split_on_the_mesh_of_the_context(self, send: Any) -> None:
        with jax.set_mesh(mesh_of(dp=2, sp=2, tp=2)):
            got = prefill_attention(CHUNK, KEY, VALUE, LENGTHS, send=send, axis_name="sp", return_lse=True, **OPTIONS)
        agrees(got, expected(CHUNK, **OPTIONS))

    def test_queries_travel_over_a_ring_of_two_axes_in_any_order(self) -> None:
        swapped = over(mesh=mesh_of(a=2, b=4), axis_name=("b", "a"), layout="striped")
        operands = (to_layout(x, "striped", 8) for x in (CHUNK, KEY, VALUE))
        got = prefill_attention(*operands, LENGTHS, send="queries", **swapped, **OPTIONS)
        agrees(got, expected(CHUNK, **OPTIONS), "striped", 8)

    def test_the_ring_need_not_divide_the_chunk(self) -> None:
        seven = CHUNK[:, :7]
        agrees(prefill_attention(seven, KEY, VALUE, LENGTHS, send="queries", **over()), expected(seven))

    def test_it_sends_what_is_fewer_bytes(self) -> None:
        """The two forms of the program, and the counts of bytes, near the point where both are equal too."""

        def attend(tokens: int, room: int) -> str:
            placed: dict[str, Any] = {"mesh": mesh_of(sp=2), "axis_name": "sp"}
            program = jax.jit(lambda q, k, v: prefill_attention(q, k, v, room, **placed))
            return program.lower(CHUNK[:, :tokens], KEY[:, :room], VALUE[:, :room]).as_text()

        few, many = attend(4, 48), attend(24, 48)
        assert "all_gather" in few and "reduce_scatter" in few and "collective_permute" not in few
        assert "collective_permute" in many and "all_gather" not in many

        # 8 queries: 8 * 4 heads * (8 * 4 + 6 * 4 + 12) bytes = 2176; a key and value: 2 heads * 14 * 4 bytes = 112
        call = validated(CHUNK[:, :8], KEY[:, :20], VALUE[:, :20], ranks=1)
        assert bytes_to_send(call) == (2 * 20 * 112, 2 * 2176)  # two rows of the batch
        assert "collective_permute" not in attend(8, 20) and "collective_permute" in attend(8, 18)


def rolling(lengths: Any, room: int) -> np.ndarray:
    """The position of each entry's token in a rolling cache, entries in natural order; negative if empty."""
    last = np.asarray(lengths)[:, None] - 1
    return last - (last - np.arange(room)) % room


@pytest.mark.parametrize(
    ("ranks", "layout", "kind"),
    [
        (1, "contiguous", AxisType.Auto),
        (3, "zigzag", AxisType.Auto),
        (4, "striped", AxisType.Explicit),
    ],
)
def test_a_rolling_cache_gives_what_the_whole_cache_gives(ranks: int, layout: str, kind: AxisType) -> None:
    """A window of 13 needs 13 entries beside those of the chunk. A row of 3 tokens leaves the others empty."""
    lengths, options = np.array([43, 3]), {"sliding_window": (13, 0), "alibi_slopes": SLOPES}
    chunk, positions = CHUNK[:, : 6 if ranks == 3 else 8], rolling(lengths, 24)
    wanted, empty = expected(chunk, lengths, **options), (positions < 0)[:, :, None, None]

    def entries(x: Any) -> np.ndarray:
        return np.where(empty, 0, np.take_along_axis(np.asarray(x), np.maximum(positions, 0)[:, :, None, None], 1))

    of_cache = [to_layout(entries(x), layout, ranks) for x in (KEY, VALUE)]
    query, held = to_layout(chunk, layout, ranks), to_layout(positions, layout, ranks)
    call: dict[str, Any] = over(mesh=mesh_of(kind, sp=ranks), layout=layout) | options

    def attend(function: Any, *operands: Any, **more: Any) -> Any:
        return function(*operands, jnp.asarray(lengths), kv_positions=held, **call, **more)

    step = jax.jit(functools.partial(attend, decode_attention))
    agrees(step(NEW, *of_cache), expected(NEW, lengths, **options))
    by = {send: functools.partial(attend, prefill_attention, send=send) for send in ("queries", "keys")}
    agrees(jax.jit(by["queries"])(query, *of_cache), wanted, layout, ranks)
    agrees(jax.jit(by["keys"])(query, *of_cache), wanted, layout, ranks)
    _, (dq, *found) = graded(lambda *x: by["keys"](*x)[0], query, *of_cache)
    _, (exact, *of_whole) = graded(lambda *x: expected(x[0], lengths, *x[1:], **options)[0], chunk, KEY, VALUE)
    for got, one in zip((dq, *found), (exact, *map(entries, of_whole)), strict=True):
        close(from_layout(got, layout, ranks), one, 5e-5)


def test_a_rolling_cache_works_in_ones_own_shard_map_and_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SHORTEST_CHUNK", 4)
    forget_traced_calls()
    positions, lengths = rolling(LENGTHS, 24), LENGTHS
    key, value = (np.take_along_axis(x, positions[:, :, None, None] % S, 1) for x in (KEY, VALUE))

    def local(key: Any, value: Any, held: Any) -> Any:
        return decode_attention(
            NEW, key, value, lengths, sliding_window=(13, 0), kv_positions=held, axis_name="sp", return_lse=True
        )

    mapped = jax.shard_map(local, mesh=mesh_of(sp=2), in_specs=(SPLIT, SPLIT, SPLIT), out_specs=P())
    agrees(jax.jit(mapped)(key, value, positions), expected(NEW, sliding_window=(13, 0)))
    forget_traced_calls()


DECODE, PREFILL = (decode_attention, NEW), (prefill_attention, CHUNK)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "longer than the cache": (DECODE, {"lengths": [5, 49]}, "lengths: has values from 5 to 49. .*0 to 48"),
    "negative, of a rolling cache": (
        DECODE,
        {"lengths": -1, "kv_positions": jnp.arange(48)},
        r"lengths: has the value -1. Pass lengths from 0 to 2\^30",
    ),
    "of another batch": (DECODE, {"lengths": [1, 2, 3]}, r"lengths: has shape \(3,\)"),
    "without lengths": (DECODE, {"lengths": None}, "lengths: is missing"),
    "uneven": (DECODE, {"key_cache": KEY[:, :30], "value_cache": VALUE[:, :30], "lengths": 1}, "Pad it to 32"),
    "an option of ring_attention": (DECODE, {"bias": 1}, "bias: .* call ring_attention with .* query_offset="),
    "no axis": (PREFILL, {"axis_name": None}, "axis_name is missing"),
    "uneven zigzag": (PREFILL, {"query": CHUNK[:, :12], "layout": "zigzag"}, "query has 12. Pad it to 16"),
    "send": (PREFILL, {"send": "values"}, "send: got 'values'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    (attend, query), changes, told = REFUSED[name]
    given = {"query": query, "key_cache": KEY, "value_cache": VALUE, "lengths": LENGTHS}
    with pytest.raises((InputError, MeshError), match=told):
        attend(**given | over() | changes)


@pytest.mark.parametrize(
    ("attend", "query", "kept", "axis", "told"),
    [
        (decode_attention, SPLIT, SPLIT, "sp", "query: differs between"),
        (decode_attention, P(), P(), "sp", "key_cache: is replicated over"),
        (prefill_attention, P(), SPLIT, "sp", "query: is replicated over"),
        (prefill_attention, SPLIT, SPLIT, None, r"the mesh axes \('sp',\) of the surrounding shard_map may split"),
    ],
)
def test_arrays_and_axes_of_a_shard_map_that_do_not_fit_are_refused(
    attend: Any, query: P, kept: P, axis: Any, told: str
) -> None:
    mapped = jax.shard_map(
        lambda q, k, v: attend(q, k, v, 3, axis_name=axis),
        mesh=mesh_of(sp=2), in_specs=(query, kept, kept), out_specs=SPLIT,
    )  # fmt: skip
    with pytest.raises((InputError, MeshError), match=told):
        mapped(CHUNK, KEY, VALUE)


@pytest.mark.parametrize(
    ("attend", "given"),
    [(decode_attention, {}), (decode_attention, over()), (prefill_attention, over(send="queries"))],
)
def test_a_derivative_is_refused_where_no_key_travels(attend: Any, given: dict[str, Any]) -> None:
    def out(query: Any) -> Any:
        return attend(query, KEY, VALUE, LENGTHS, **given | {"return_lse": False})

    for differentiate in (jax.grad(lambda x: out(x).sum()), lambda x: jax.jvp(out, (x,), (x,))):
        with pytest.raises(DerivativeError, match=f"{attend.__name__} has no derivative"):
            differentiate(CHUNK)


def test_a_backend_that_drives_its_own_ring_runs_only_calls_whose_keys_travel() -> None:
    ring = Backend("whole", 1, ("cpu",), frozenset(Feature), ring="gone:RING")
    given = over(backend="whole", return_lse=False)
    with discovery.registered(ring, lambda query, **_: query[..., :HV]):
        assert prefill_attention(CHUNK, KEY, VALUE, LENGTHS, send="keys", **given).shape == (B, T, N, HV)
        for attend in (decode_attention, functools.partial(prefill_attention, send="queries")):
            with pytest.raises(InputError, match="'whole' drives the ring itself"):
                attend(CHUNK, KEY, VALUE, LENGTHS, **given)
