# SPDX-License-Identifier: Apache-2.0
"""Calls in the caller's own shard_map: a mesh axis must be named, and the names have their effect."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core import masks, ring_attention
from ringattn_core.errors import InputError, MeshError
from ringattn_testing.rings import close, graded, mesh_of, query_key_value

B, T, N, K = 2, 16, 4, 2
TOKENS = P("dp", "sp", "tp")


def arrays() -> list[jax.Array]:
    return query_key_value(B, T, N, K)


def on_ranks(*more: Any, specs: Any = TOKENS, more_specs: Any = (), check_vma: bool = True, **options: Any) -> Any:
    """`ring_attention` in a shard_map over a 2 x 2 x 2 mesh, under jit. `more` are passed after query, key and value.

    Without jit every operation in the shard_map is a program of its own, which takes five times as long to compile.
    """

    def local(q: Any, k: Any, v: Any, *more: Any) -> Any:
        given = {name: x(*more) if callable(x) and name != "mask_builder" else x for name, x in options.items()}
        return ring_attention(q, k, v, **given)

    of_operands = (specs,) * 3 if isinstance(specs, P) else specs
    mesh = mesh_of(dp=2, sp=2, tp=2)
    specs = (*of_operands, *more_specs)
    call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=TOKENS, check_vma=check_vma)
    return jax.jit(call)(*arrays(), *more)


NAMED = dict(axis_name="sp", batch_axis_name="dp", head_axis_name="tp")
WHOLE = P("dp", None, "tp")
REPLICATED = {
    "query": dict(specs=(WHOLE, TOKENS, TOKENS)),
    "key": dict(specs=(TOKENS, WHOLE, TOKENS)),
    "value": dict(specs=(TOKENS, TOKENS, WHOLE)),
    "q_positions": dict(q_positions=lambda: jnp.arange(T // 2), kv_positions=lambda: jnp.arange(T // 2)),
}


@pytest.mark.parametrize("argument", REPLICATED)
def test_tokens_that_are_the_same_on_all_ranks_are_refused(argument: str) -> None:
    with pytest.raises(InputError, match=rf"{argument}: is replicated over \('sp',\), over which axis_name=\('sp',\)"):
        on_ranks(**NAMED, **REPLICATED[argument])


def test_without_check_vma_nothing_is_refused() -> None:
    shape = on_ranks(**NAMED, check_vma=False, q_positions=lambda: jnp.arange(T // 2)).shape
    assert shape == (B, T, N, 8)


DROPOUT = dict(dropout_prob=0.5, dropout_seed=3)
FORGOTTEN = {
    "all": ({}, "'dp', 'sp', 'tp'", "axis_name or batch_axis_name or head_axis_name"),
    "batch and heads": (dict(axis_name="sp"), "'dp', 'tp'", "batch_axis_name or head_axis_name"),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_mesh_axis_that_the_call_does_not_name_is_refused(check_vma: bool, name: str) -> None:
    named, over, unsaid = FORGOTTEN[name]
    with pytest.raises(MeshError) as error:
        on_ranks(check_vma=check_vma, **named)
    assert f"the mesh axes ({over}) of the surrounding shard_map may split the arrays" in str(error.value)
    assert f"Name them in {unsaid}; () means none" in str(error.value)
    assert ("axis_name=() that each rank has all tokens" in str(error.value)) == ("axis_name" not in named)


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_empty_axis_name_says_that_attention_is_local(check_vma: bool) -> None:
    q, k, v = arrays()
    got = on_ranks(axis_name=(), causal=True, check_vma=check_vma)
    halves = [ring_attention(*(x[:, part] for x in (q, k, v)), causal=True) for part in (slice(0, 8), slice(8, 16))]
    close(got, jnp.concatenate(halves, 1))
    with pytest.raises(MeshError, match=r"Name them in batch_axis_name or head_axis_name; \(\) means none"):
        on_ranks(axis_name=(), check_vma=check_vma, **DROPOUT)


def test_an_axis_is_not_asked_for_if_no_array_varies_over_it_or_all_names_are_given() -> None:
    q, k, v = arrays()
    mesh = mesh_of(sp=2, idle=2)
    spec = P(None, "sp")

    def of(check_vma: bool, **named: Any) -> Any:
        attend = jax.shard_map(
            lambda q, k, v: ring_attention(q, k, v, axis_name="sp", **DROPOUT, **named),
            mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma,
        )  # fmt: skip
        return jax.jit(attend)(q, k, v)

    wanted = ring_attention(q, k, v, **DROPOUT)
    close(of(True), wanted)
    with pytest.raises(MeshError, match=r"the mesh axes \('idle',\) of"):
        of(False)
    with pytest.raises(MeshError, match=r"Name them in head_axis_name;"):
        of(False, batch_axis_name=())
    close(of(False, batch_axis_name=(), head_axis_name=()), wanted)


@pytest.mark.parametrize("sinks", [N, N // 2], ids=["one a head", "shared, as many as local heads"])
def test_one_axis_of_sinks_counts_all_heads(sinks: int) -> None:
    x = jnp.linspace(-1.0, 2.0, sinks)

    def split(x: Any) -> Any:
        return on_ranks(x, more_specs=(P(),), **NAMED, softmax_aux=lambda x: x)

    close(graded(split, x), graded(lambda x: ring_attention(*arrays(), x), x))


SHARED = [(12, 3, 4, True), (12, 6, 4, False)]


@pytest.mark.parametrize(("heads", "key_heads", "ranks", "check_vma"), SHARED)
def test_query_heads_split_over_ranks_that_hold_all_key_heads_read_their_own(
    heads: int, key_heads: int, ranks: int, check_vma: bool
) -> None:
    x = query_key_value(B, T, heads, key_heads)
    of_queries, of_keys = P(None, "sp", "tp"), P(None, "sp")

    def causal(q_len: int, kv_len: int, num_heads: int, head_idx: int, num_reps: int) -> masks.Mask:
        assert (num_heads, num_reps) == (heads, heads // key_heads)
        return masks.Causal()

    def split(q: Any, k: Any, v: Any) -> Any:
        return jax.shard_map(
            lambda q, k, v: ring_attention(q, k, v, axis_name="sp", head_axis_name="tp", mask_builder=causal),
            mesh=mesh_of(sp=8 // ranks, tp=ranks), in_specs=(of_queries, of_keys, of_keys), out_specs=of_queries,
            check_vma=check_vma,
        )(q, k, v)  # fmt: skip

    close(graded(split, *x), graded(functools.partial(ring_attention, causal=True), *x))
