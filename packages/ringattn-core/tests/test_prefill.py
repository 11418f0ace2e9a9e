# SPDX-License-Identifier: Apache-2.0
"""`prefill_attention` equals dense attention to the cache, whether keys or queries travel, and sends what is less."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from ringattn_conformance import oracle
from ringattn_core import Backend, Feature, from_layout, prefill_attention, to_layout
from ringattn_core.backends import discovery
from ringattn_core.call.cache import bytes_to_send
from ringattn_core.call.validation import validated
from ringattn_core.errors import DerivativeError, InputError, MeshError

B, T, S, N, K, H, HV = 2, 24, 48, 4, 2, 8, 6
SHAPES = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, HV)}
QUERY, KEY, VALUE = (jax.random.normal(jax.random.key(number), shape) for number, shape in enumerate(SHAPES.values()))
LENGTHS = np.array([37, 20])  # the second row has fewer tokens than queries: its first four see nothing
SPLIT = P(None, "sp")
OPTIONS: dict[str, Any] = {
    "softmax_aux": jnp.linspace(-1.0, 1.0, N), "sliding_window": (13, 0), "alibi_slopes": jnp.linspace(0.1, 0.5, N)
}  # fmt: skip


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=jax.devices()[:count]
    )


def expected(options: dict[str, Any], dout: Any = None, tokens: int = T) -> oracle.Answer:
    names = {"sliding_window": "window", "softmax_aux": "sinks", "alibi_slopes": "slopes"}
    positions = LENGTHS[:, None] - tokens + np.arange(tokens)
    given = {names[name]: np.asarray(x) if hasattr(x, "shape") else x for name, x in options.items()}
    q, k, v = (np.asarray(x) for x in (QUERY[:, :tokens], KEY, VALUE))
    return oracle.attend(oracle.Problem(q, k, v, causal=True, q_positions=positions, **given), dout)


def agrees(got: Any, wanted: oracle.Answer, layout: str = "contiguous", ranks: int = 1) -> None:
    np.testing.assert_allclose(from_layout(got[0], layout, ranks), wanted.out, atol=2e-5)
    np.testing.assert_allclose(from_layout(got[1], layout, ranks, axis=2), wanted.lse, atol=2e-5)


@pytest.mark.parametrize(
    ("ranks", "layout", "kind", "send"),
    [
        (2, "zigzag", AxisType.Explicit, "keys"),
        (3, "striped", AxisType.Auto, "queries"),
        (8, "contiguous", AxisType.Explicit, "queries"),
    ],
)
def test_it_equals_the_oracle_on_global_arrays(ranks: int, layout: str, kind: AxisType, send: Any) -> None:
    mesh, operands = mesh_of(kind, sp=ranks), [to_layout(x, layout, ranks) for x in (QUERY, KEY, VALUE)]

    def attend(lengths: Any, *operands: Any) -> Any:
        over: dict[str, Any] = {"mesh": mesh, "axis_name": "sp", "layout": layout, "return_lse": True}
        return prefill_attention(*operands, lengths, send=send, **over, **OPTIONS)

    agrees(jax.jit(attend)(jnp.asarray(LENGTHS), *operands), expected(OPTIONS), layout, ranks)


@pytest.mark.parametrize("send", ["keys", "queries"])
def test_batch_and_heads_may_be_split_on_the_mesh_of_the_context(send: Any) -> None:
    mesh = mesh_of(dp=2, sp=2, tp=2)
    with jax.set_mesh(mesh):
        got = prefill_attention(QUERY, KEY, VALUE, LENGTHS, send=send, axis_name="sp", return_lse=True, **OPTIONS)
    agrees(got, expected(OPTIONS))


def test_queries_travel_over_a_ring_of_two_axes_in_any_order() -> None:
    swapped: dict[str, Any] = {"mesh": mesh_of(a=2, b=4), "axis_name": ("b", "a"), "layout": "striped"}
    operands = (to_layout(x, "striped", 8) for x in (QUERY, KEY, VALUE))
    got = prefill_attention(*operands, LENGTHS, send="queries", return_lse=True, **swapped, **OPTIONS)
    agrees(got, expected(OPTIONS), "striped", 8)


def test_the_ring_need_not_divide_the_chunk() -> None:
    over: dict[str, Any] = {"mesh": mesh_of(sp=4), "axis_name": "sp", "return_lse": True}
    agrees(prefill_attention(QUERY[:, :7], KEY, VALUE, LENGTHS, send="queries", **over), expected({}, tokens=7))


def test_gradients_are_the_oracles_where_keys_travel_and_refused_where_queries_do() -> None:
    dout = jax.random.normal(jax.random.key(9), (B, T, N, HV))

    def loss(send: Any, *operands: Any) -> Any:
        return (prefill_attention(*operands, LENGTHS, send=send, mesh=mesh_of(sp=2), axis_name="sp") * dout).sum()

    wanted = expected({}, np.asarray(dout)).gradients
    gradients = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)("keys", QUERY, KEY, VALUE)
    for name, x in zip("qkv", gradients, strict=True):
        np.testing.assert_allclose(x, wanted[f"d{name}"], atol=5e-5 * max(1, np.abs(wanted[f"d{name}"]).max()))
    with pytest.raises(DerivativeError, match="no derivative where it sends the queries"):
        jax.grad(loss, 1)("queries", QUERY, KEY, VALUE)


def test_it_sends_what_is_fewer_bytes() -> None:
    """The two forms of the program, and the counts of bytes, near the point where both are equal too."""

    def attend(tokens: int, room: int) -> str:
        over: dict[str, Any] = {"mesh": mesh_of(sp=2), "axis_name": "sp"}
        program = jax.jit(lambda q, k, v: prefill_attention(q, k, v, room, **over))
        return program.lower(QUERY[:, :tokens], KEY[:, :room], VALUE[:, :room]).as_text()

    few, many = attend(4, 48), attend(24, 48)
    assert "all_gather" in few and "reduce_scatter" in few and "collective_permute" not in few
    assert "collective_permute" in many and "all_gather" not in many

    # 8 queries: 8 * 4 heads * (8 * 4 + 6 * 4 + 12) bytes = 2176; a key and value: 2 heads * 14 * 4 bytes = 112
    call = validated(QUERY[:, :8], KEY[:, :20], VALUE[:, :20], ranks=1)
    assert bytes_to_send(call) == (2 * 20 * 112, 2 * 2176)  # two rows of the batch
    assert "collective_permute" not in attend(8, 20) and "collective_permute" in attend(8, 18)


OPERANDS: dict[str, Any] = {"query": QUERY, "key_cache": KEY, "value_cache": VALUE, "lengths": LENGTHS}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "longer than the cache": ({"lengths": [5, 49]}, InputError, "lengths: has values from 5 to 49. .* from 0 to 48"),
    "uneven zigzag": ({"query": QUERY[:, :12], "layout": "zigzag"}, InputError, "query has 12. Pad it to 16"),
    "send": ({"send": "values"}, InputError, "send: got 'values'. Pass one of 'auto', 'keys', 'queries'"),
    "no axis": ({"axis_name": None}, MeshError, "axis_name is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_and_what_to_do(name: str) -> None:
    changes, kind, told = REFUSED[name]
    with pytest.raises(kind, match=told):
        prefill_attention(**OPERANDS | {"mesh": mesh_of(sp=4), "axis_name": "sp"} | changes)


@pytest.mark.parametrize(
    ("query", "cache", "axis", "told"),
    [
        (P(), SPLIT, "sp", "query: is replicated over"),
        (SPLIT, P(), "sp", "key_cache: is replicated over"),
        (SPLIT, SPLIT, None, r"the mesh axes \('sp',\) of the surrounding shard_map may split"),
    ],
)
def test_arrays_and_axes_of_a_shard_map_that_do_not_fit_are_refused(query: P, cache: P, axis: Any, told: str) -> None:
    mapped = jax.shard_map(
        lambda q, k, v: prefill_attention(q, k, v, 3, axis_name=axis),
        mesh=mesh_of(sp=2), in_specs=(query, cache, cache), out_specs=SPLIT,
    )  # fmt: skip
    with pytest.raises((InputError, MeshError), match=told):
        mapped(QUERY, KEY, VALUE)


def test_a_backend_that_drives_its_own_ring_cannot_send_the_queries() -> None:
    ring = Backend("whole", 1, ("cpu",), frozenset(Feature), ring="gone:RING")
    given: dict[str, Any] = {"backend": "whole", "mesh": mesh_of(sp=2), "axis_name": "sp"}
    with discovery.registered(ring, lambda query, **_: query[..., :HV]):
        assert prefill_attention(**OPERANDS, send="keys", **given).shape == (B, T, N, HV)
        with pytest.raises(InputError, match="'whole' drives the ring itself"):
            prefill_attention(**OPERANDS, send="queries", **given)
