# SPDX-License-Identifier: Apache-2.0
"""`RINGATTN_CHECK=1` raises for mistakes that otherwise give wrong numbers, and changes nothing where it is off."""

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.dispatch import runtime_tokens
from jax.errors import JaxRuntimeError
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from ringattn_core import MaskInfo, decode_attention, prefill_attention, ring_attention, to_layout
from ringattn_core.errors import InputError
from ringattn_testing.right_programs import Program

B, S, N, H = 2, 16, 4, 8
Q, K, V = (jax.random.normal(key, (B, S, N, H)) for key in jax.random.split(jax.random.key(0), 3))
INDEX = jnp.arange(S, dtype=jnp.int32)
DOCUMENTS = MaskInfo.from_documents([[7, 6, 3], [5, 8]], S, restart_positions=True)
IDS, RESTARTED = DOCUMENTS.q_segment_ids, DOCUMENTS.q_positions
TRIANGLE = jnp.tril(jnp.ones((S, S), bool))[None, None]
SPECS = {
    "check_positions": P("sp"),
    "q_segment_ids": P(None, "sp"),
    "kv_segment_ids": P(None, "sp"),
    "q_positions": P("sp"),
    "attention_mask": P(None, None, "sp"),
    "bias": P(None, None, "sp"),
    "selected": P(None, "sp"),
}


@pytest.fixture(autouse=True)
def _checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RINGATTN_CHECK", "1")
    yield
    runtime_tokens.clear()  # JAX keeps the error of a callback, and `jax.effects_barrier` would raise it in other tests


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def attention(ring: int, form: str, options: dict[str, Any], kind: AxisType = AxisType.Auto) -> Callable[[Any], Any]:
    """The sum of an attention call with `Q` multiplied by a number, over a mesh or in a `shard_map` of the caller."""
    arrays = {name: x for name, x in options.items() if name in SPECS}
    static = {name: x for name, x in options.items() if name not in SPECS} | {"axis_name": "sp"}
    mesh = mesh_of(kind, sp=ring)
    if form == "mesh":
        return lambda factor: ring_attention(factor * Q, K, V, mesh=mesh, **static, **arrays).sum()
    specs = {
        name: P(None, *SPECS[name]) if x.ndim > len(SPECS[name]) == 1 else SPECS[name] for name, x in arrays.items()
    }
    tokens = P(None, "sp")

    def local(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        return ring_attention(q, k, v, **static, **arrays)

    tracked = form == "tracked"
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(tokens, tokens, tokens, specs), out_specs=tokens, check_vma=tracked
    )
    return lambda factor: sharded(factor * Q, K, V, arrays).sum()


def run(function: Callable[[Any], Any], mode: str) -> Any:
    function = jax.grad(function) if "grad" in mode else function
    function = jax.jit(function) if "jit" in mode else function
    return jax.block_until_ready(function(jnp.float32(1)))


def raises(fact: str) -> Any:
    """JAX wraps what a callback raises; the message ends with ours, and names the line of the call."""
    return pytest.raises(JaxRuntimeError, match=f"InputError: {fact}.*looked at the call in .*test_check.py:[0-9]+")


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "natural order in zigzag": (
        {"layout": "zigzag", "check_positions": INDEX},
        r"check_positions: token \d of rank 0 has index \d, but 'zigzag' on \d ranks has \d+ there\. Reorder every "
        r"array of tokens by to_layout\(x, 'zigzag', \d\), or pass layout='contiguous'",
    ),
    "an order of no layout": (
        {"check_positions": jnp.stack([INDEX, INDEX[::-1]])},
        r"check_positions: token 0 of rank 0 has index 15, but 'contiguous' on \d ranks has 0 there\. Pass every array",
    ),
    "segment ids in natural order": (
        {"layout": "striped", "q_segment_ids": IDS},
        "q_segment_ids: its values are in the order of 'contiguous', but the call says 'striped'",
    ),
    "positions in natural order": (
        {"layout": "zigzag", "q_positions": INDEX},
        "q_positions: its values are in the order of 'contiguous', but the call says 'zigzag'",
    ),
    "positions of documents in natural order": (
        {"layout": "striped", "q_positions": RESTARTED},
        "q_positions: its values are in the order of 'contiguous', but the call says 'striped'",
    ),
    "rows of a mask in natural order": (
        {"layout": "zigzag", "attention_mask": TRIANGLE},
        "attention_mask: its values are in the order of 'contiguous', but the call says 'zigzag'",
    ),
    "rows of a bias in natural order": (
        {"layout": "striped", "bias": jnp.where(TRIANGLE, 0.0, -1e9)},
        "bias: its values are in the order of 'contiguous', but the call says 'striped'",
    ),
    "a promise that documents break": (
        {"max_distance": (4, None), "q_segment_ids": IDS},
        "max_distance: promises 4 on the left, but the masks let a query see a key 7 tokens away there",
    ),
    "a promise that positions break": (
        {"max_distance": (None, 2), "causal": True, "q_positions": -INDEX},
        "max_distance: promises 2 on the right, but the masks let a query see a key 15 tokens away there",
    ),
    "a promise that a mask breaks": (
        {"max_distance": (9, 0), "attention_mask": TRIANGLE},
        "max_distance: promises 9 on the left, but the masks let a query see a key 15 tokens away there",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_sentence(mistake: str) -> None:
    options, fact = MISTAKES[mistake]
    with raises(fact):
        run(attention(4, "shard_map", options), "jit of grad")


OF_DOCUMENTS = (
    jnp.repeat(jnp.array([0, 7, 13]), jnp.array([7, 6, 3])),
    jnp.repeat(jnp.array([6, 12, 15]), jnp.array([7, 6, 3])),
)
"""The first and the last token of the document of each token."""


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"layout": "zigzag"}, "kv_range: its values are in the order of 'contiguous', but the call says 'zigzag'"),
        (
            {"max_distance": (4, None)},
            "max_distance: promises 4 on the left, but the masks let a query see a key 6 tokens away there",
        ),
    ],
)
def test_ranges_that_were_not_reordered_or_that_a_promise_cuts_off_are_told(options: Any, fact: str) -> None:
    with raises(fact):
        run(attention(4, "mesh", {"kv_range": OF_DOCUMENTS, **options}), "jit of grad")


NEWEST = jnp.stack([INDEX // 2, 0 * INDEX], -1)[None, :, None].repeat(B, 0)
"""The ids of each token's own block of two, and of the first."""


def test_ids_of_blocks_that_are_not_there_or_in_another_order_are_told() -> None:
    chosen = {"selected": NEWEST + 1, "selected_size": 2}
    with raises("selected: has ids from 1 to 8. Pass ids from 0 to 7"):
        run(attention(4, "shard_map", chosen), "jit of grad")
    chosen = {"selected": NEWEST, "selected_size": 2, "causal": True}
    with raises("selected: its values are in the order of 'contiguous', but the call says 'zigzag'"):
        run(attention(4, "mesh", {**chosen, "layout": "zigzag"}), "jit of grad")
    run(attention(4, "mesh", chosen), "jit of grad")
    some_later = NEWEST.at[:, :3, 0, 0].set(7)
    for ids, layout in ((to_layout(NEWEST, "zigzag", 4), "zigzag"), (some_later, "contiguous")):
        run(attention(4, "mesh", {**chosen, "selected": ids, "layout": layout}), "jit")


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_ranges_in_the_order_of_the_layout_and_ranges_around_other_tokens_are_no_mistake(layout: str) -> None:
    placed = tuple(to_layout(x, layout, 4, 0) for x in OF_DOCUMENTS)
    other = (jnp.where(INDEX == 6, 15, -5), 20)  # one query sees only later keys, all others every key

    @jax.jit
    def attend(*ends: jax.Array) -> jax.Array:
        return attention(4, "mesh", {"kv_range": ends, "layout": layout, "max_distance": 15})(jnp.float32(1))

    for ends in (placed, (placed[1], placed[0]), (INDEX - 3, INDEX - 1), (0, 5), other):
        jax.block_until_ready(attend(*(jnp.broadcast_to(x, S) for x in ends)))


@pytest.mark.parametrize(
    ("ring", "form", "mode"),
    [
        (2, "mesh", "eager"),
        (4, "mesh", "jit of grad"),
        (2, "shard_map", "grad"),
        (2, "tracked", "jit of grad"),
    ],
)
def test_every_form_of_a_call_raises(ring: int, form: str, mode: str) -> None:
    options, fact = MISTAKES["natural order in zigzag"]
    with raises(fact):
        run(attention(ring, form, options), mode)


@pytest.mark.parametrize(
    ("layout", "ring", "kind"),
    [
        ("striped", 2, AxisType.Auto),
        ("zigzag", 4, AxisType.Explicit),
    ],
)
def test_a_call_without_mistakes_gives_the_same_numbers(
    layout: str, ring: int, kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def placed(x: jax.Array, axis: int) -> jax.Array:
        return to_layout(x, layout, ring, axis)

    options = {
        "layout": layout,
        "causal": True,
        "max_distance": 7,
        "check_positions": placed(INDEX, 0),
        "q_segment_ids": placed(IDS, 1),
        "q_positions": placed(RESTARTED, 1),
        "attention_mask": placed(TRIANGLE, 2),
    }

    def found() -> tuple[jax.Array, ...]:
        function = attention(ring, "mesh", options, kind)
        return run(jax.value_and_grad(function), "jit")

    checked = found()
    monkeypatch.delenv("RINGATTN_CHECK")
    np.testing.assert_array_equal(checked, found())


def test_padding_of_uneven_lengths_is_not_compared() -> None:
    def attend(index: jax.Array) -> jax.Array:
        x = Q[:, :14]
        return ring_attention(x, x, x, check_positions=index, mesh=mesh_of(sp=4), axis_name="sp")

    jax.block_until_ready(attend(INDEX[:14]))
    with raises("check_positions: token 1 of rank 3 has index 14, but 'contiguous' on 4 ranks has 13 there"):
        jax.block_until_ready(attend(INDEX[:14].at[13].set(14)))


@pytest.mark.parametrize("form", ["mesh", "shard_map"])
def test_off_the_program_is_the_same(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(**options: Any) -> str:
        return jax.jit(jax.grad(attention(2, form, options))).lower(jnp.float32(1)).as_text()

    plain = {"layout": "zigzag", "max_distance": 3, "q_segment_ids": IDS}
    assert "callback" in program(**plain)
    monkeypatch.delenv("RINGATTN_CHECK")
    without = program(**plain)
    assert "callback" not in without
    monkeypatch.setenv("RINGATTN_CHECK", "0")
    assert program(**plain) == without
    assert program(**plain, check_positions=INDEX[::-1]) == without


def in_shard_map(local: Callable[..., Any], specs: Any, mode: str, **sizes: int) -> Callable[..., Any]:
    mesh = mesh_of(**sizes)
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return jax.jit(function) if mode == "jit" else function


@pytest.mark.parametrize(("mode", "ring"), [("eager", 2), ("jit", 4)])
def test_swapped_axis_names_are_found(mode: str, ring: int) -> None:
    """By key heads that are not split, and by segment ids, which the ranks of a head axis share."""
    swapped = {"axis_name": "tp", "head_axis_name": "sp", "batch_axis_name": ()}

    def shared(q: Any, k: Any) -> Any:
        return ring_attention(q, k, k, **swapped)

    split, whole = P(None, "sp", "tp"), P(None, "sp")
    with raises(r"axis_name: all ranks of \('tp',\) hold the same key\. Name .* split the tokens, not \('sp',\)"):
        jax.block_until_ready(in_shard_map(shared, (split, whole), mode, sp=ring, tp=2)(Q, K[:, :, :1]))

    def documents(q: Any, ids: Any) -> Any:
        return ring_attention(q, q, q, q_segment_ids=ids, **swapped)

    with raises(r"head_axis_name: q_segment_ids differs between the ranks of \('sp',\), which must all have the same"):
        jax.block_until_ready(in_shard_map(documents, (split, whole), mode, sp=ring, tp=2)(Q, IDS))


def test_a_bias_of_one_head_and_one_query_for_each_rank_is_no_mistake() -> None:
    def attend(q: Any, bias: Any) -> Any:
        return ring_attention(q, q, q, bias=bias, axis_name="sp", head_axis_name="tp", batch_axis_name=())

    specs = (P(None, "sp", "tp"), P(None, "tp", "sp"))
    bias = jax.random.normal(jax.random.key(3), (1, N, 2, 2))
    jax.block_until_ready(in_shard_map(attend, specs, "jit", sp=2, tp=N)(Q[:, :2], bias))


@pytest.mark.parametrize("form", ["mesh", "shard_map"])
def test_shards_with_equal_values_are_no_mistake(form: str) -> None:
    attend = functools.partial(ring_attention, axis_name="sp")
    if form == "mesh":
        over = jax.jit(functools.partial(attend, mesh=mesh_of(sp=4)))
    else:
        over = in_shard_map(attend, (P(None, "sp"),) * 3, "jit", sp=4)
    for q, k, v in ((Q, K, V[:, :1]), (Q[:, :1], K[:, :1], V[:, :1]), (Q, K, jnp.tile(V[:, :2], (1, S // 2, 1, 1)))):
        jax.block_until_ready(over(*(jnp.broadcast_to(x, Q.shape) for x in (q, k, v))))


@pytest.mark.parametrize(
    ("blocks", "layout", "ring"),
    [((0, 1, 0, 1), "contiguous", 2), ((0, 1, 1, 0), "zigzag", 2), ((0, 1, 2, 2, 1, 0, 3, 3), "zigzag", 4)],
)
def test_ids_may_return_in_any_order(blocks: tuple[int, ...], layout: str, ring: int) -> None:
    ids = to_layout(np.repeat(np.int32([blocks] * B), S // len(blocks), 1), layout, ring)
    run(attention(ring, "mesh", {"q_segment_ids": jnp.asarray(ids), "causal": True, "layout": layout}), "jit")


@pytest.mark.parametrize("seed", range(4))
def test_right_programs_raise_nothing(seed: int) -> None:
    """`right_programs.py` draws them, and runs more as a script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Program(seed).run()


@pytest.mark.parametrize("form", ["mesh", "shard_map"])
def test_an_expand_that_mixes_tokens_is_found(form: str) -> None:
    def attend(expand: Any) -> Any:
        call = functools.partial(ring_attention, expand=expand, axis_name="sp")
        if form == "mesh":
            return jax.jit(functools.partial(call, mesh=mesh_of(sp=4)))(Q, K)
        return in_shard_map(call, (P(None, "sp"),) * 2, "jit", sp=4)(Q, K)

    jax.block_until_ready(attend(lambda x, _: (x, 2 * x)))
    with raises("expand: mixes tokens: half of them alone do not give what they give among the others. Compute each"):
        jax.block_until_ready(attend(lambda x, _: (x, jnp.cumsum(x, 1))))


@pytest.mark.parametrize(("mode", "ring"), [("eager", 2), ("jit", 4)])
def test_tokens_that_no_axis_splits_are_found(mode: str, ring: int) -> None:
    attend = in_shard_map(lambda q, k: ring_attention(q, k, k, axis_name="sp"), (P(), P()), mode, sp=ring)
    with raises(r"axis_name: all ranks of \('sp',\) hold the same query"):
        jax.block_until_ready(attend(Q, K))
    jax.block_until_ready(attend(jnp.ones_like(Q), jnp.ones_like(K)))  # constants, as an initialisation has them


@pytest.mark.parametrize(("send", "ring", "mode"), [(None, 4, "jit"), ("keys", 2, "eager"), ("queries", 4, "jit")])
def test_lengths_past_a_cache_are_found(send: str | None, ring: int, mode: str) -> None:
    attend: Any = decode_attention if send is None else functools.partial(prefill_attention, send=send)
    new, fact = Q[:, :8], f"lengths: says that a row holds 17 tokens, but the cache has room for {S}"
    over_mesh = jax.jit(lambda lengths: attend(new, K, V, lengths, mesh=mesh_of(sp=ring), axis_name="sp"))
    specs = (P() if send is None else P(None, "sp"), P(None, "sp"), P(None, "sp"), P())
    local = in_shard_map(lambda *arrays: attend(*arrays, axis_name="sp"), specs, mode, sp=ring)
    for call in (over_mesh, functools.partial(local, new, K, V)):
        jax.block_until_ready(call(jnp.array([16, 9])))
        with raises(fact):
            jax.block_until_ready(call(jnp.array([9, 17])))


def test_a_window_that_looks_like_a_count_is_warned_of() -> None:
    def attend(window: Any) -> jax.Array:
        return ring_attention(Q, K, V, causal=True, sliding_window=window)

    with pytest.warns(UserWarning, match=r"sliding_window: 1024 lets a query see 1025 keys .* pass 1023") as caught:
        attend((1024, 0))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for window in (1023, 64, (None, 0)):
            attend(window)


def test_vmapped_checkpointed_and_scanned_calls_raise() -> None:
    options, fact = MISTAKES["natural order in zigzag"]
    attend = jax.checkpoint(attention(2, "mesh", options))

    def loss(factor: Any) -> Any:
        scanned = jax.lax.scan(lambda total, x: (total + attend(x), None), 0.0, factor * jnp.ones(2))[0]
        return scanned + jax.vmap(attend)(factor * jnp.ones(2)).sum()

    with raises(fact):
        run(loss, "jit of grad")


def test_a_call_within_a_pipeline_raises() -> None:
    """A `shard_map` with `check_vma=True` around a call on global arrays, differentiated."""
    mesh = mesh_of(pp=2, sp=2)

    def stage(q: Any) -> Any:
        return ring_attention(q, K, V, layout="zigzag", check_positions=INDEX, axis_name="sp", head_axis_name=())

    with jax.set_mesh(mesh):
        piped = jax.shard_map(stage, in_specs=P("pp"), out_specs=P("pp"), axis_names={"pp"})
        with raises("check_positions: token 4 of rank 0 has index 4"):
            jax.block_until_ready(jax.jit(jax.grad(lambda q: piped(q).sum()))(jnp.concatenate([Q, Q])))


def test_a_shard_map_that_leaves_axes_automatic_is_not_checked_and_warns() -> None:
    tokens = P(None, "sp")

    def local(q: Any) -> Any:
        return ring_attention(q, q, q, axis_name="sp", batch_axis_name=(), head_axis_name=())

    attend = jax.shard_map(
        local, mesh=mesh_of(sp=2, dp=2), in_specs=tokens, out_specs=tokens, axis_names={"sp"}, check_vma=False
    )
    with pytest.warns(UserWarning, match="RINGATTN_CHECK=1 cannot look at the call in .*automatic, here dp"):
        jax.block_until_ready(jax.jit(attend)(Q))


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGATTN_CHECK", "yes")
    with pytest.raises(InputError, match=re.escape("RINGATTN_CHECK: got 'yes'. Set it to 1 or 0, or unset it")):
        ring_attention(Q, K, V)
