# SPDX-License-Identifier: Apache-2.0
"""Calls in the caller's own shard_map: missing axis names are refused, and given axis names are used."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core import masks, ring_attention
from ringattn_core.errors import InputError, MeshError

B, T, N, K, H = 2, 16, 4, 2, 8
TOKENS = P("dp", "sp", "tp")


def arrays() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (B, T, h, H)) for key, h in zip(keys, (N, K, K), strict=True)]


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def on_ranks(*more: Any, specs: Any = TOKENS, more_specs: Any = (), check_vma: bool = True, **options: Any) -> Any:
    """`ring_attention` in a shard_map over a 2 x 2 x 2 mesh. `arrays` are passed after query, key and value."""

    def local(q: Any, k: Any, v: Any, *more: Any) -> Any:
        given = {name: x(*more) if callable(x) and name != "mask_builder" else x for name, x in options.items()}
        return ring_attention(q, k, v, **given)

    of_operands = (specs,) * 3 if isinstance(specs, P) else specs
    mesh = mesh_of(dp=2, sp=2, tp=2)
    return jax.shard_map(local, mesh=mesh, in_specs=(*of_operands, *more_specs), out_specs=TOKENS, check_vma=check_vma)(
        *arrays(), *more
    )


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5)


WHOLE = P("dp", None, "tp")
REPLICATED = {
    "query": dict(specs=(WHOLE, TOKENS, TOKENS)),
    "q_positions": dict(q_positions=lambda: jnp.arange(T // 2), kv_positions=lambda: jnp.arange(T // 2)),
}


@pytest.mark.parametrize("argument", REPLICATED)
def test_tokens_that_are_the_same_on_all_ranks_are_refused(argument: str) -> None:
    with pytest.raises(InputError, match=rf"{argument}: is replicated over \('sp',\), over which axis_name=\('sp',\)"):
        on_ranks(axis_name="sp", **REPLICATED[argument])


def test_keys_and_values_that_are_the_same_on_all_ranks_are_refused() -> None:
    q, k, v = arrays()
    mesh = mesh_of(sp=2)
    for specs, argument in (((P(None, "sp"), P(), P()), "key"), ((P(None, "sp"), P(None, "sp"), P()), "value")):
        local = (q, k[:, :8], v[:, :8]) if argument == "key" else (q, k, v[:, :8])
        with pytest.raises(InputError, match=rf"{argument}: is replicated over"):
            jax.shard_map(
                lambda q, k, v: ring_attention(q, k, v, axis_name="sp"),
                mesh=mesh,
                in_specs=specs,
                out_specs=P(None, "sp"),
            )(*local)


def test_without_check_vma_nothing_is_refused() -> None:
    shape = on_ranks(axis_name="sp", check_vma=False, q_positions=lambda: jnp.arange(T // 2)).shape
    assert shape == (B, T, N, H)


def test_constant_segment_ids_pass() -> None:
    q, k, v = arrays()
    got = on_ranks(axis_name="sp", q_segment_ids=lambda: jnp.zeros((B // 2, T // 2), jnp.int32))
    close(got, ring_attention(q, k, v))


DROPPED = dict(axis_name="sp", dropout_prob=0.5, dropout_seed=3)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("named", "over", "unsaid"),
    [
        ({}, "'dp', 'tp'", "batch_axis_name and head_axis_name"),
        ({"batch_axis_name": "dp"}, "'tp',", "head_axis_name"),
        ({"head_axis_name": "tp"}, "'dp',", "batch_axis_name"),
    ],
)
def test_dropout_needs_the_axes_that_split_batch_and_heads(
    check_vma: bool, named: dict[str, str], over: str, unsaid: str
) -> None:
    with pytest.raises(InputError) as error:
        on_ranks(check_vma=check_vma, **DROPPED, **named)
    assert f"dropout_prob: needs the global indices of batch and heads, and the mesh axes ({over})" in str(error.value)
    assert f"in {unsaid}; () means none" in str(error.value)


def test_dropout_with_named_axes_is_that_of_one_device() -> None:
    close(
        on_ranks(**DROPPED, batch_axis_name="dp", head_axis_name="tp"),
        ring_attention(*arrays(), dropout_prob=0.5, dropout_seed=3),
    )


def test_an_empty_name_says_that_an_axis_splits_neither() -> None:
    q, k, v = arrays()
    mesh = mesh_of(sp=2, idle=2)
    spec = P(None, "sp")

    def local(q: Any, k: Any, v: Any, **named: Any) -> Any:
        return ring_attention(q, k, v, **DROPPED, **named)

    def of(**named: Any) -> Any:
        return jax.shard_map(
            lambda *x: local(*x, **named), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(q, k, v)  # fmt: skip

    with pytest.raises(InputError, match=r"the mesh axes \('idle',\) may split them"):
        of()
    close(of(batch_axis_name=(), head_axis_name=()), ring_attention(q, k, v, dropout_prob=0.5, dropout_seed=3))


def of_heads(q_len: int, kv_len: int, heads: int, head: int, reps: int) -> masks.Mask:
    assert (q_len, kv_len, heads) == (T, T, N)
    return masks.Causal(head)


def test_masks_of_each_head_need_the_axis_that_splits_the_heads() -> None:
    with pytest.raises(InputError, match=r"mask_builder: needs the global indices"):
        on_ranks(axis_name="sp", mask_builder=lambda a, b, c, head, e: masks.Causal(head))
    got = on_ranks(axis_name="sp", mask_builder=of_heads, head_axis_name="tp")
    close(got, ring_attention(*arrays(), mask_builder=of_heads))


def test_one_mask_for_all_heads_needs_no_axis() -> None:
    close(on_ranks(axis_name="sp", mask_builder=lambda *_: masks.Causal()), ring_attention(*arrays(), causal=True))


@pytest.mark.parametrize("sinks", [(N,), (3,), (N // 2,)], ids=["one a head", "shared", "as many as local heads"])
def test_one_axis_of_sinks_counts_all_heads(sinks: tuple[int]) -> None:
    x = jnp.linspace(-1.0, 2.0, sinks[0])
    w = jax.random.normal(jax.random.key(1), (B, T, N, H))

    def split(x: Any) -> Any:
        return on_ranks(
            x, more_specs=(P(),), axis_name="sp", batch_axis_name="dp", head_axis_name="tp", softmax_aux=lambda x: x
        )

    close(split(x), ring_attention(*arrays(), x))
    close(
        jax.jit(jax.grad(lambda x: (split(x) * w).sum()))(x),
        jax.grad(lambda x: (ring_attention(*arrays(), x) * w).sum())(x),
    )


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_sinks_that_are_split_with_the_heads_are_those_of_each_head(shape: tuple[int, ...]) -> None:
    x = jnp.linspace(-1.0, 2.0, N)
    given = x.reshape(shape)
    got = on_ranks(given, more_specs=(P("tp"),), axis_name="sp", head_axis_name="tp", softmax_aux=lambda x: x)
    close(got, ring_attention(*arrays(), x))


@pytest.mark.parametrize("argument", ["batch_axis_name", "head_axis_name"])
def test_an_axis_that_the_mesh_lacks_is_refused(argument: str) -> None:
    with pytest.raises(MeshError, match=f"{argument}='rows' is not an axis of the surrounding shard_map"):
        on_ranks(axis_name="sp", **{argument: "rows"})


def test_a_bias_with_the_columns_of_one_rank_is_refused() -> None:
    with pytest.raises(InputError, match=r"bias: has shape .* its last axis counts the keys of the whole sequence"):
        on_ranks(
            jnp.zeros((1, 1, 1, T)), more_specs=(P(None, None, None, "sp"),), axis_name="sp", bias=lambda x: x
        )  # fmt: skip
