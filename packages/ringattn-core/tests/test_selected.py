# SPDX-License-Identifier: Apache-2.0
"""`selected`: a query sees the keys or blocks of keys that it is given, on every ring, layout, strategy and mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import decode_attention, prefill_attention, ring_attention
from ringattn_core.contract import bits
from ringattn_core.errors import InputError
from ringattn_testing.rings import RINGS, close, graded, in_order_of, masked, mesh_of, query_key_value

B, T, N, K = 2, 48, 4, 2
OPERANDS = query_key_value(B, T, N, K)


def drawn_ids(groups: int, size: int, count: int = 4, tokens: int = T, keys: int = T, seed: int = 0) -> np.ndarray:
    """Ids at random, repeated ones, blocks after the query and -1 among them; some queries choose nothing."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, -(-keys // size), (B, tokens, groups, count)).astype(np.int32)
    ids[:, ::7] = -1
    return ids


def dense(ids: Any, size: int, keys: int = T) -> jax.Array:
    """The choice as a dense mask, `[B, N, T, S]`, of single keys."""
    ids = np.moveaxis(np.asarray(ids), 2, 1)
    seen = (ids[..., None] == np.arange(keys) // size).any(-2)
    return jnp.asarray(np.repeat(seen, N // seen.shape[1], 1))


@pytest.mark.parametrize("count", [bits.FEW, bits.FEW + 1])
def test_few_and_many_numbers_become_bits(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "MARKS_AT_ONCE", 2 * 3 * 150)  # three times two rows, and one more
    numbers = np.random.default_rng(count).integers(-3, 153, (3, 7, count)).astype(np.int32)
    words = bits.of_numbers(jnp.asarray(numbers), 150)
    got = bits.unpacked(words, 160)  # no number sets a bit behind the last
    np.testing.assert_array_equal(got, (numbers[..., None] == np.arange(160)).any(2) & (np.arange(160) < 150))


@pytest.mark.parametrize("groups", [1, K, N])
@pytest.mark.parametrize("size", [1, 4, 5, 64])
def test_chosen_blocks_are_the_mask_of_their_keys(groups: int, size: int) -> None:
    ids = drawn_ids(groups, size)
    options: dict[str, Any] = {"causal": size != 5, "return_lse": True}
    got = graded(lambda *x: ring_attention(*x, selected=ids, selected_size=size, **options), *OPERANDS)
    close(got, masked(dense(ids, size), *OPERANDS, **options))


@pytest.mark.parametrize(("ranks", "layout", "kind"), RINGS)
def test_every_ring_and_layout_gives_the_result_of_one_device(ranks: int, layout: str, kind: AxisType) -> None:
    size = 1 if layout == "striped" else 4 if ranks == 3 else 3
    mesh, ids = mesh_of(kind, sp=ranks), drawn_ids(K, size, 6)
    options: dict[str, Any] = {"causal": ranks != 3, "sliding_window": None if ranks < 4 else (30, None)}

    def ring(q: Any, k: Any, v: Any, ids: Any) -> Any:
        chosen = {"selected": ids, "selected_size": size}
        return ring_attention(q, k, v, **chosen, mesh=mesh, axis_name="sp", layout=layout, **options)

    moved = in_order_of(layout, ranks, ring)
    got = graded(lambda *x: moved(*x, jnp.asarray(ids)), *OPERANDS)
    wanted = masked(dense(ids, size), *OPERANDS, **options)
    close(got, wanted, atol=5e-5)


def test_many_single_keys_are_chosen_on_a_ring() -> None:
    ids, options = drawn_ids(1, 1, bits.FEW + 1), {"causal": True}

    def ring(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return ring_attention(q, k, v, selected=ids, mesh=mesh_of(sp=4), axis_name="sp", layout="striped", **options)

    moved = in_order_of("striped", 4, ring)
    got = graded(lambda *x: moved(*x, jnp.asarray(ids)), *OPERANDS)
    close(got, masked(dense(ids, 1), *OPERANDS, **options), atol=5e-5)


def test_the_bits_of_a_split_batch_are_made_where_its_numbers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "MARKS_AT_ONCE", 2 * B * T)  # several rows in turn
    ids = jax.device_put(drawn_ids(1, 1, bits.FEW + 1), jax.NamedSharding(mesh_of(dp=2), P("dp")))
    program = jax.jit(bits.of_numbers, static_argnums=1).lower(jnp.swapaxes(ids, 1, 2), T).compile().as_text()
    assert "while" in program and "all-gather" not in program


OF_THE_RING = {"strategy", "layout", "balance", "max_distance"}
OTHERS: dict[str, dict[str, Any]] = {
    "all-gather": {"strategy": "all_gather"},
    "ulysses": {"strategy": "ulysses"},
    "ulysses in zigzag order": {"strategy": "ulysses", "layout": "zigzag"},
    "balance": {"balance": "zigzag", "causal": True},
    "balance and all-gather": {"balance": "zigzag", "causal": True, "strategy": "all_gather"},
    "window": {"causal": True, "sliding_window": (10, None)},
    "promise": {"max_distance": 60},
    "offset": {"causal": True, "query_offset": 3},
    "segments, a range and a dense mask of heads": {
        "q_segment_ids": jnp.asarray(np.repeat([[0, 1, 2, -1]], T // 4, 1).repeat(B, 0)), "kv_range": (4, 40),
        "attention_mask": jax.random.bernoulli(jax.random.key(9), 0.7, (B, N, T, T)),
    },
    "dense mask": {"attention_mask": jax.random.bernoulli(jax.random.key(9), 0.7, (1, 1, T, T))},
    "bias, ALiBi, largest scores": {
        "bias": jax.random.normal(jax.random.key(8), (1, N, T, T)), "alibi_slopes": jnp.ones(N) / 8,
        "return_max_logits": True,
    },
    "sinks, soft cap and dropout": {
        "softmax_aux": jnp.ones(N), "logits_soft_cap": 4.0, "dropout_prob": 0.3, "dropout_seed": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "groups"), [*zip(OTHERS, (K, N, K, 1, N) * 4, strict=False)])
def test_chosen_keys_stay_with_their_queries_beside_every_option(name: str, groups: int) -> None:
    options, ids = OTHERS[name], jnp.asarray(drawn_ids(groups, 6, 3))
    # Options that decide on sends need four ranks, others two.
    layout, ranks = options.get("layout", "contiguous"), 4 if {*OF_THE_RING, "sliding_window"} & options.keys() else 2
    alone = {n: x for n, x in options.items() if n not in OF_THE_RING}
    options = {"mesh": mesh_of(sp=ranks), "axis_name": "sp", **options}

    def ring(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return ring_attention(q, k, v, selected=ids, selected_size=6, **options)

    moved = ring if layout == "contiguous" else in_order_of(layout, ranks, ring)
    mask = dense(ids, 6) & alone.pop("attention_mask", jnp.ones((1, 1, 1, 1), bool))
    wanted = masked(mask, *OPERANDS, **alone)
    close(graded(lambda *x: moved(*x, ids), *OPERANDS), wanted, atol=5e-5)


@pytest.mark.parametrize(
    ("of_heads", "key_heads", "groups"),
    [(2, 1, 4), (2, 2, 2), (2, 4, 1), (4, 1, 1), (4, 2, 2), (4, 2, 4), (4, 4, 4)],
)
def test_a_mesh_that_splits_heads_splits_the_groups_of_ids(of_heads: int, key_heads: int, groups: int) -> None:
    operands, ids = query_key_value(B, T, N, key_heads), drawn_ids(groups, 8)
    chosen = {"selected": jnp.asarray(ids), "selected_size": 8, "mesh": mesh_of(sp=2, tp=of_heads), "axis_name": "sp"}
    got = graded(lambda *x: ring_attention(*x, **chosen, causal=True), *operands)
    close(got, masked(dense(ids, 8), *operands, causal=True), atol=5e-5)


def test_uneven_lengths_are_padded_to_whole_blocks_on_every_rank() -> None:
    tokens, keys = 37, 53
    q, k, v = (x[:, :n] for x, n in zip(query_key_value(B, 64, N, K), (tokens, keys, keys), strict=True))
    ids, mesh = drawn_ids(K, 8, tokens=tokens, keys=keys), mesh_of(sp=4)
    chosen = {"selected": ids, "selected_size": 8, "mesh": mesh, "axis_name": "sp"}
    wanted = masked(dense(ids, 8, keys), q, k, v)
    close(graded(lambda *x: ring_attention(*x, **chosen), q, k, v), wanted)
    q, ids = k.repeat(2, 2), drawn_ids(1, 8, tokens=keys, keys=keys)
    wanted = masked(dense(ids, 8, keys), q, k, v, causal=True)
    close(graded(lambda *x: ring_attention(*x, **chosen | {"selected": ids}, causal=True), q, k, v), wanted)


def test_neither_the_order_of_ids_nor_repeats_change_a_bit_and_all_blocks_are_the_dense_call() -> None:
    one_row = [x[:1] for x in OPERANDS]
    every = np.broadcast_to(np.arange(6, dtype=np.int32), (1, T, 1, 6))
    mixed = np.concatenate([every[..., ::-1], every[..., :3]], -1)
    calls = [{}, {"selected": every, "selected_size": 8}, {"selected": mixed, "selected_size": 8}]
    plain, *others = [graded(lambda *x, c=c: ring_attention(*x, causal=True, **c), *one_row) for c in calls]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, plain)


def test_keys_that_no_query_chose_have_no_gradient() -> None:
    ids = np.broadcast_to(np.array([1, 3, -1], np.int32), (B, T, 1, 3))
    _, (_, dk, dv) = graded(lambda *x: ring_attention(*x, selected=ids, selected_size=8), *OPERANDS)
    chosen = np.isin(np.arange(T) // 8, [1, 3])
    for gradient in (dk, dv):
        assert not np.asarray(gradient)[:, ~chosen].any() and np.asarray(gradient)[:, chosen].all()


@pytest.mark.parametrize(("size", "ranks"), [(1, 2), (4, 4)])
def test_latents_travel_under_a_choice(size: int, ranks: int) -> None:
    q, x, _ = OPERANDS
    ids, mesh = drawn_ids(1, size), mesh_of(sp=ranks)
    latents, weights = x.reshape(B, T, -1), jax.random.normal(jax.random.key(5), (K * 8, 2 * N * 8)) / 4

    def expand(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tuple(jnp.split((x @ weights).reshape(*x.shape[:2], N, 16), 2, -1))

    def ring(q: Any, x: Any, w: Any) -> Any:
        options = {"selected": ids, "selected_size": size, "mesh": mesh, "axis_name": "sp"}
        return ring_attention(q, x, expand=expand, expand_params=w, causal=True, **options)

    def alone(q: Any, x: Any, w: Any) -> Any:
        return ring_attention(q, *expand(x, w), attention_mask=dense(ids, size), causal=True)

    close(graded(ring, q, latents, weights), graded(alone, q, latents, weights), atol=5e-5)


@pytest.mark.parametrize("transformed", ["vmap", "checkpoint"])
def test_transformations_keep_the_choice(transformed: str) -> None:
    ids = jnp.asarray(drawn_ids(K, 4))

    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return ring_attention(q[None], k[None], v[None], selected=ids[None], selected_size=4, causal=True)[0]

    def call(*x: Any) -> Any:
        if transformed == "vmap":
            return jax.vmap(attend)(*x, ids)
        return jax.checkpoint(lambda *x: ring_attention(*x, selected=ids, selected_size=4, causal=True))(*x)

    wanted = masked(dense(ids, 4), *OPERANDS, causal=True)
    close(graded(call, *OPERANDS), wanted)


@pytest.mark.parametrize(("groups", "ranks"), [(N, 1), (1, 4), (K, 4)])
def test_a_cache_is_read_by_the_chosen_blocks(groups: int, ranks: int) -> None:
    tokens, lengths = 8, np.array([40, 48], np.int32)
    q, (_, k, v) = OPERANDS[0][:, :tokens], OPERANDS
    ids = drawn_ids(groups, 4, 5, tokens)
    positions = lengths[:, None] - tokens + np.arange(tokens, dtype=np.int32)
    wanted = ring_attention(
        q, k, v, attention_mask=dense(ids, 4), causal=True, q_positions=positions, kv_positions=np.arange(T)
    )
    chosen = {"selected": ids, "selected_size": 4}
    mesh = {} if ranks == 1 else {"mesh": mesh_of(sp=ranks), "axis_name": "sp"}
    close(decode_attention(q, k, v, lengths, **chosen, **mesh), wanted)
    for send in ("keys", "queries"):
        close(prefill_attention(q, k, v, lengths, send=send, **chosen, **mesh), wanted)


def test_a_long_cache_is_cut_into_chunks_of_whole_blocks() -> None:
    q, k, v = query_key_value(1, 4096, N, K)
    ids = np.random.default_rng(0).integers(0, 4096 // 64, (1, 2, K, 8)).astype(np.int32)
    got = decode_attention(q[:, :2], k, v, 4000, selected=ids, selected_size=64)
    mask = dense(ids, 64, 4096)
    close(got, ring_attention(q[:, :2], k, v, attention_mask=mask, causal=True, query_offset=3998))


def test_no_array_has_an_entry_for_each_query_and_key() -> None:
    length, size = 4096, 64
    q, k, v = (jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (2, 1, 1))
    ids = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.int32)
    call = graded_program(lambda q, k, v, ids: ring_attention(q, k, v, selected=ids, selected_size=size, causal=True))
    stats = jax.jit(call).lower(q, k, v, ids).compile().memory_analysis()
    assert stats is not None and stats.temp_size_in_bytes < length * length / 2


def graded_program(attend: Any) -> Any:
    """The gradients of the sum of the results by query, key and value."""
    return jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))


IDS = drawn_ids(1, 8)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "floats": ({"selected": IDS.astype(np.float32)}, "selected: has dtype float32"),
    "rank": ({"selected": IDS[:, :, 0]}, r"selected: has shape \(2, 48, 4\). It needs \(2, 48, 1|2|4, n\)"),
    "batch": ({"selected": IDS[:1]}, "selected: has shape"),
    "groups": ({"selected": np.repeat(IDS, 3, 2)}, "selected: has shape"),
    "out of range": ({"selected": IDS, "selected_size": 16}, "selected: has values from -1 to 5. Pass ids from 0 to 2"),
    "below -1": ({"selected": IDS - 1, "selected_size": 8}, "selected: has values from -2 to 4"),
    "no size": ({"selected": IDS, "selected_size": 0}, "selected_size: got 0"),
    "traced size": ({"selected": IDS, "selected_size": 2.5}, "selected_size: got 2.5"),
    "no ids": ({"selected_size": 8}, "selected_size: is 8, but there is no selected"),
    "straddling in zigzag": (
        {"selected": IDS, "selected_size": 8, "layout": "zigzag", "mesh": 4}, "selected_size: is 8, which does not"
    ),
    "striped": ({"selected": IDS, "selected_size": 8, "layout": "striped", "mesh": 4}, "in striped order"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_choice_is_refused(name: str) -> None:
    options, said = REFUSED[name]
    if "mesh" in options:
        options = options | {"mesh": mesh_of(sp=4), "axis_name": "sp"}
    with pytest.raises(InputError, match=said):
        ring_attention(*OPERANDS, **options)


def test_a_block_on_two_ranks_is_refused_in_one_s_own_shard_map() -> None:
    mesh, spec = mesh_of(sp=4), P(None, "sp")

    def local(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return ring_attention(q, k, v, selected=ids, selected_size=8, axis_name="sp")

    with pytest.raises(InputError, match="selected_size: is 8, which does not divide the shard of a rank, of 12 keys"):
        jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)(*OPERANDS, jnp.asarray(IDS))
