# SPDX-License-Identifier: Apache-2.0
"""`decode_attention` equals dense attention to the filled part of the cache, on every ring, and moves no key."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from ringattn_conformance import oracle
from ringattn_core import Backend, Feature, decode_attention, prefill_attention
from ringattn_core.backends import discovery
from ringattn_core.errors import DerivativeError, InputError, MeshError
from ringattn_core.strategies import cache
from ringattn_xla.block import KERNEL as XLA
from traced_calls import forget_traced_calls

B, T, S, N, K, H, HV = 3, 2, 32, 4, 2, 8, 6
SHAPES = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, HV)}
QUERY, KEY, VALUE = (jax.random.normal(jax.random.key(number), shape) for number, shape in enumerate(SHAPES.values()))
LENGTHS = np.array([5, 32, 17])
SINKS = jnp.linspace(-1.0, 1.0, N)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"softmax_aux": SINKS},
    "slopes": {"alibi_slopes": jnp.linspace(0.1, 0.5, N)},
    "many": {
        "softmax_aux": SINKS,
        "sliding_window": 9,
        "logits_soft_cap": 3.0,
        "alibi_slopes": jnp.linspace(0.1, 0.5, N),
    },
}


def mesh_of(ranks: int, **others: int) -> Mesh:
    sizes = (*others.values(), ranks)
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), (*others, "sp"))


def expected(lengths: Any, tokens: int = T, **options: Any) -> oracle.Answer:
    positions = np.asarray(lengths)[:, None] - tokens + np.arange(tokens)
    names = {
        "sliding_window": "window", "chunk_size": "chunk", "softmax_aux": "sinks", "logits_soft_cap": "soft_cap",
        "softmax_scale": "scale", "alibi_slopes": "slopes",
    }  # fmt: skip
    given = {names[name]: value for name, value in options.items()}
    q, k, v = (np.asarray(x) for x in (QUERY[:, :tokens], KEY, VALUE))
    return oracle.attend(oracle.Problem(q, k, v, causal=True, q_positions=positions, **given))


def agrees(got: Any, wanted: oracle.Answer) -> None:
    np.testing.assert_allclose(got[0], wanted.out, atol=2e-6)
    np.testing.assert_allclose(got[1], wanted.lse, atol=2e-6)


@pytest.mark.parametrize(("name", "ranks"), [("plain", 8), ("many", 4)])
def test_it_equals_the_oracle_on_global_arrays(name: str, ranks: int) -> None:
    options = OPTIONS[name]
    over = {"mesh": mesh_of(ranks), "axis_name": "sp"}
    wanted = expected(LENGTHS, **options)
    agrees(decode_attention(QUERY, KEY, VALUE, LENGTHS, return_lse=True, **over, **options), wanted)


@pytest.mark.parametrize(("name", "keys", "most"), [("plain", 2, 256), ("sinks", 4, 12), ("many", 2, 256)])
def test_a_cache_that_is_cut_into_chunks_gives_the_same(
    name: str, keys: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SHORTEST_CHUNK", keys)
    monkeypatch.setattr(cache, "MOST_CHUNKS", most)
    forget_traced_calls()
    seen = []
    chunked = cache._chunked
    monkeypatch.setattr(cache, "_chunked", lambda block, count: seen.append(count) or chunked(block, count))
    over = {"mesh": mesh_of(2), "axis_name": "sp"}
    got = decode_attention(QUERY, KEY, VALUE, LENGTHS, return_lse=True, **over, **OPTIONS[name])
    agrees(got, expected(LENGTHS, **OPTIONS[name]))
    assert seen == [8 if keys == 2 else 2]
    forget_traced_calls()


def test_a_kernel_reads_each_key_once_for_all_heads_of_a_group_and_is_told_that_positions_grow() -> None:
    rows = []

    class Kernel:
        def forward(self, block: Any, partial: Any) -> Any:
            assert block.rule.increasing  # so that it needs no list of the tiles to visit
            rows.append((block.q.shape, block.k.shape))
            return XLA.forward(block, partial)

        def backward(self, *_: Any) -> Any:
            raise AssertionError

    mine = Backend("mine", 1, ("cpu",), frozenset(Feature), kernel="gone:KERNEL")
    with discovery.registered(mine, Kernel()):
        agrees(decode_attention(QUERY, KEY, VALUE, LENGTHS, backend="mine", return_lse=True), expected(LENGTHS))
        slopes = OPTIONS["slopes"]
        got = decode_attention(QUERY, KEY, VALUE, LENGTHS, backend="mine", return_lse=True, **slopes)
        agrees(got, expected(LENGTHS, **slopes))
    assert rows == [((B, T * N // K, K, H), (B, S, K, H)), ((B, T, N, H), (B, S, K, H))]


def test_on_one_device_it_needs_no_mesh_and_takes_one_length_for_all_rows() -> None:
    got = decode_attention(QUERY[:, :1], KEY, VALUE, 9, return_lse=True)
    agrees(got, expected([9] * B, 1))
    agrees((decode_attention(QUERY[:, :1], KEY, VALUE, 9), got[1]), expected([9] * B, 1))


def test_batch_and_heads_may_be_split_too() -> None:
    mesh = mesh_of(2, dp=1, tp=2)
    options = {"softmax_aux": SINKS, "alibi_slopes": jnp.linspace(0.1, 0.5, N)}
    wanted = expected(LENGTHS, **options)
    agrees(decode_attention(QUERY, KEY, VALUE, LENGTHS, mesh=mesh, axis_name="sp", return_lse=True, **options), wanted)

    def local(query: Any, key: Any, value: Any, slopes: Any) -> Any:
        return decode_attention(
            query, key, value, LENGTHS, SINKS, alibi_slopes=slopes, axis_name="sp", head_axis_name="tp", return_lse=True
        )

    heads, cache = P(None, None, "tp"), P(None, "sp", "tp")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(heads, cache, cache, P("tp")), out_specs=(heads, P(None, "tp")))
    agrees(jax.jit(mapped)(QUERY, KEY, VALUE, options["alibi_slopes"]), wanted)


def test_rows_without_tokens_are_zero_and_what_lies_beyond_the_length_is_not_seen() -> None:
    lengths = np.array([0, 1, 20])
    beyond = jnp.arange(S)[None, :, None, None] >= lengths[:, None, None, None]
    key, value = (jnp.where(beyond, 1e30, x) for x in (KEY, VALUE))
    out, lse = decode_attention(QUERY, key, value, lengths, mesh=mesh_of(4), axis_name="sp", return_lse=True)
    agrees((out, lse), expected(lengths))
    assert (out[0] == 0).all() and jnp.isneginf(lse[0]).all()
    assert (out[1, 0] == 0).all() and (out[1, 1] != 0).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_may_be_that_of_the_context_or_of_the_arrays(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("sp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    step = functools.partial(decode_attention, softmax_aux=SINKS, axis_name="sp", return_lse=True)
    wanted = expected(LENGTHS, softmax_aux=SINKS)
    with jax.set_mesh(mesh):
        agrees(jax.jit(step)(QUERY, KEY, VALUE, jnp.asarray(LENGTHS)), wanted)
        agrees(step(QUERY, KEY, VALUE, LENGTHS), wanted)
    if kind == AxisType.Explicit:
        key, value = (jax.device_put(x, jax.NamedSharding(mesh, P(None, "sp", "tp"))) for x in (KEY, VALUE))
        agrees(step(QUERY, key, value, LENGTHS), wanted)


def test_a_forgotten_axis_name_in_a_shard_map_is_refused() -> None:
    cache = P(None, "sp")
    mapped = jax.shard_map(
        lambda q, k, v: decode_attention(q, k, v, 3), mesh=mesh_of(2), in_specs=(P(), cache, cache), out_specs=P("sp")
    )
    with pytest.raises(MeshError, match=r"the mesh axes \('sp',\) of the surrounding shard_map may split"):
        mapped(QUERY, KEY, VALUE)


def test_a_vmapped_call_is_that_of_each_example() -> None:
    over: dict[str, Any] = {"mesh": mesh_of(4), "axis_name": "sp", "return_lse": True}
    lengths = jnp.stack([jnp.asarray(LENGTHS), jnp.asarray(LENGTHS) - 3])
    out, lse = jax.vmap(lambda length: decode_attention(QUERY, KEY, VALUE, length, **over))(lengths)
    for number in range(2):
        agrees((out[number], lse[number]), expected(lengths[number]))


def test_no_key_travels() -> None:
    cache = jax.NamedSharding(mesh_of(8), P(None, "sp"))
    program = jax.jit(
        lambda q, k, v, lengths: decode_attention(q, k, v, lengths, mesh=mesh_of(8), axis_name="sp"),
        in_shardings=(None, cache, cache, None),
    )
    text = program.lower(QUERY, KEY, VALUE, LENGTHS).compile().as_text() or ""
    assert "collective-permute" not in text and "all-gather" not in text and "all-to-all" not in text
    sent = re.findall(r"f32\[([\d,]+)\]\S* all-reduce", text) + re.findall(r"all-reduce\(f32\[([\d,]+)\]", text)
    assert len(sent) == 1
    assert np.prod([int(n) for n in sent[0].split(",")]) == 8 * B * T * N * (HV + 1)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "longer than the cache": ({"lengths": [5, 33, 1]}, InputError, "lengths: has values from 1 to 33"),
    "of another batch": ({"lengths": [1, 2]}, InputError, r"lengths: has shape \(2,\)"),
    "uneven": ({"key_cache": KEY[:, :30], "value_cache": VALUE[:, :30], "lengths": 1}, InputError, "Allocate 32"),
    "an option of ring_attention": ({"bias": 1}, InputError, "bias: .* call ring_attention with .* query_offset="),
    "axis": ({"axis_name": "ring"}, MeshError, "axis_name='ring' is not an axis of the mesh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    changes, kind, told = REFUSED[name]
    given = {"query": QUERY, "key_cache": KEY, "value_cache": VALUE, "lengths": LENGTHS}
    with pytest.raises(kind, match=told):
        decode_attention(**given | {"mesh": mesh_of(4), "axis_name": "sp"} | changes)


@pytest.mark.parametrize(
    ("query", "cache", "told"),
    [(P(None, "sp"), P(None, "sp"), "query: differs between"), (P(), P(), "key_cache: is replicated over")],
)
def test_arrays_that_are_split_where_they_should_be_whole_are_refused(query: P, cache: P, told: str) -> None:
    mapped = jax.shard_map(
        lambda q, k, v: decode_attention(q, k, v, 3, axis_name="sp"),
        mesh=mesh_of(2), in_specs=(query, cache, cache), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(InputError, match=told):
        mapped(QUERY, KEY, VALUE)


@pytest.mark.parametrize("mesh", [None, mesh_of(2)])
def test_a_derivative_is_refused(mesh: Any) -> None:
    def attend(query: Any) -> Any:
        return decode_attention(query, KEY, VALUE, LENGTHS, mesh=mesh, axis_name="sp" if mesh else None)

    for differentiate in (jax.grad(lambda x: attend(x).sum()), lambda x: jax.jvp(attend, (x,), (x,))):
        with pytest.raises(DerivativeError, match="decode_attention has no derivative"):
            differentiate(QUERY)


def test_a_backend_that_drives_its_own_ring_is_refused() -> None:
    ring = Backend("whole", 1, ("cpu",), frozenset(Feature), ring="gone:RING")
    with (
        discovery.registered(ring, lambda **_: None),
        pytest.raises(InputError, match="'whole' drives the ring itself"),
    ):
        decode_attention(QUERY, KEY, VALUE, LENGTHS, backend="whole")


def test_the_example_decodes_what_one_pass_over_the_sequence_gives() -> None:
    example = Path(__file__).parents[3] / "examples/decode.py"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(example), "--room", "128", "--chunk", "32", "--steps", "3"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(" as in one pass") == 3


@pytest.mark.parametrize("attend", [decode_attention, prefill_attention])
def test_a_call_without_lengths_is_told_what_they_are(attend: Any) -> None:
    with pytest.raises(InputError, match=r"lengths: is missing\. Pass how many tokens each row of the cache holds"):
        attend(QUERY, KEY, VALUE)
