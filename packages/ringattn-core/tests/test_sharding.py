# SPDX-License-Identifier: Apache-2.0
"""With a mesh, arrays are global: specs are derived, uneven lengths padded, and what does not fit is refused."""

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_core
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import decode_attention, masks, per_shard, ring_attention
from ringattn_core.call import sharding
from ringattn_core.errors import DerivativeError, InputError, MeshError
from ringattn_testing.rings import close, mesh_of, query_key_value

N, K = 4, 2


def arrays(length: int = 16, batch: int = 2, kv_length: int | None = None) -> list[jax.Array]:
    query, key, value = query_key_value(batch, max(length, kv_length or length), N, K)
    return [query[:, :length], *(x[:, : kv_length or length] for x in (key, value))]


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (dict(data=2, sp=2, tp=2), P("data", "sp", "tp")),
        (dict(sp=4, model=2), P(None, "sp", "model")),
    ],
)
def test_batch_and_heads_go_over_the_axes_with_the_usual_names(axes: dict[str, int], spec: P):
    q, k, v = arrays()
    options: dict[str, Any] = dict(causal=True, dropout_prob=0.3, dropout_seed=7)
    result = ring_attention(q, k, v, mesh=mesh_of(**axes), axis_name="sp", **options)
    close(result, ring_attention(q, k, v, **options))
    assert result.sharding.is_equivalent_to(NamedSharding(result.sharding.mesh, spec), 4)


def test_a_warning_names_the_line_of_the_caller():
    q, k, v = arrays()
    idle = {"mesh": mesh_of(other=2, sp=2), "axis_name": "sp"}

    def traced(q: jax.Array) -> Any:
        return ring_attention(q, k, v, **idle)

    for call in (
        lambda: ring_attention(q, k, v, **idle),
        lambda: jax.jit(traced)(q),
        lambda: decode_attention(q[:, :1], k, v, 16, **idle),
    ):
        with pytest.warns(UserWarning, match="nothing is split") as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]
    # A file beside the package whose name begins like that of the package.
    beside = f"{Path(ringattn_core.__file__).parent}_of_mine.py"
    with pytest.warns(UserWarning, match="nothing is split") as caught:
        eval(compile("call()", beside, "eval"), {"call": functools.partial(ring_attention, q, k, v, **idle)})
    assert [warning.filename for warning in caught] == [beside]
    with jax.set_mesh(mesh_of(sp=2)):
        for call in (lambda: ring_attention(q, k, v), lambda: decode_attention(q[:, :1], k, v, 16)):
            with pytest.warns(UserWarning, match="names none of them") as caught:
                call()
            assert [warning.filename for warning in caught] == [__file__]


def test_a_warning_is_of_the_module_of_the_caller_for_filters():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=re.escape(__name__) + "$")
        ring_attention(*arrays(), mesh=mesh_of(other=2, sp=2), axis_name="sp")


@pytest.mark.parametrize(("axis", "named"), [("dp", "batch_axis_name"), ("tp", "head_axis_name")])
def test_who_keeps_the_batch_or_the_heads_whole_is_not_warned_of_the_axis_for_them(axis: str, named: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring_attention(*arrays(), mesh=mesh_of(sp=2, **{axis: 2}), axis_name="sp", **{named: ()})


@pytest.mark.parametrize("lengths", [(1, 1), (5, 23), (16, 13)])
def test_lengths_that_do_not_divide_are_padded_and_cut(lengths: tuple[int, int]):
    q, k, v = arrays(lengths[0], kv_length=lengths[1])
    rng = np.random.default_rng(0)
    bias = jnp.asarray(rng.normal(size=(1, N, *lengths)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 1, *lengths)) < 0.8)
    built: list[tuple[int, ...]] = []

    def builder(*given: int) -> Any:
        built.append(given)
        return masks.Causal(1) | masks.Prefix(3)

    options: dict[str, Any] = dict(attention_mask=mask, mask_builder=builder, return_lse=True)
    whole = ring_attention(q, k, v, None, bias, **options)
    ring = ring_attention(q, k, v, None, bias, mesh=mesh_of(sp=4), axis_name="sp", **options)
    for got, wanted in zip(ring, whole, strict=True):
        close(got, wanted)
    assert set(built) == {(*lengths, N, head, N // K) for head in range(N)}


def test_a_bias_of_one_row_stays_one_row_when_queries_are_padded():
    q, k, v = arrays(7)
    bias = jnp.arange(7.0)[None, None, None]
    close(ring_attention(q, k, v, None, bias, mesh=mesh_of(sp=4), axis_name="sp"), ring_attention(q, k, v, None, bias))


def test_given_specs_decide_what_carries_batch_and_heads():
    q, k, v = arrays()
    mesh = mesh_of(data=2, sp=2, tp=2)
    spec = P("tp", "sp", None, None)
    result = ring_attention(q, k, v, causal=True, mesh=mesh, axis_name="sp", in_specs=(spec,) * 3, out_specs=spec)
    close(result, ring_attention(q, k, v, causal=True))
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    specs = {"in_specs": [spec] * 3, "out_specs": (spec, P("tp", None, "sp"))}
    close(ring_attention(q, k, v, causal=True, mesh=mesh, axis_name="sp", return_lse=True, **specs)[0], result)


@pytest.mark.parametrize(("axes", "named"), [(dict(rows=2), dict(batch_axis_name="rows")), (dict(dp=2, tp=2), {})])
def test_a_mesh_without_a_sequence_axis_needs_no_axis_name(axes: dict[str, int], named: dict[str, Any]):
    x, dropout = arrays(13), dict(dropout_prob=0.5, dropout_seed=1)
    close(ring_attention(*x, mesh=mesh_of(**axes), **named, **dropout), ring_attention(*x, **dropout))


def test_names_that_are_given_empty_leave_batch_and_heads_whole():
    q, k, v = arrays()
    result = ring_attention(q, k, v, mesh=mesh_of(data=2, sp=4), axis_name="sp", batch_axis_name=(), head_axis_name=())
    assert result.sharding.spec == P(None, "sp", None, None)
    close(result, ring_attention(q, k, v))


@pytest.mark.parametrize("form", ["one device", "mesh", "shard"])
def test_forward_mode_is_refused_in_a_sentence(form: str):
    q, k, v = arrays()
    options: dict[str, Any] = dict(mesh=mesh_of(sp=4), axis_name="sp") if form == "mesh" else {}
    attend = per_shard("xla") if form == "shard" else ring_attention
    with pytest.raises(DerivativeError, match=r"in forward mode .* reverse mode"):
        jax.jvp(lambda q: attend(q, k, v, **options), (q,), (q,))


SPLIT = P("data", "sp")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no axis name": (dict(axis_name=None), "axis_name is missing.*one of 'sp'"),
    "unknown axis": (dict(axis_name="ring"), "axis_name='ring' is not an axis of the mesh"),
    "a batch that does not divide": (dict(axis_name="data", batch_axis_name="sp"), "query has batch 2, which"),
    "zigzag of 18": (dict(layout="zigzag"), "'zigzag' .* that 8 divides.*Pad it to 24"),
    "too few specs": (dict(in_specs=(P(),)), "must be the PartitionSpecs of query"),
    "specs without the ring": (dict(in_specs=(P("data"),) * 3), "must split query, key and value alike"),
    "five entries": (dict(in_specs=(P(*"abcde"),) * 3), r"in_specs\[0\].* has 5 entries"),
    "an axis of specs that is none": (dict(in_specs=(P("rows", "sp"),) * 3), r"in_specs\[0\]='rows' is not"),
    "an axis twice in a spec": (dict(in_specs=(P("data", "sp", "data"),) * 3), "name a mesh axis twice"),
    "one axis twice": (dict(batch_axis_name="data", head_axis_name="data"), "share a mesh axis"),
    "another output": (dict(out_specs=P()), "out_specs=P.* must be P.*, the spec of the q"),
    "another lse": (dict(return_lse=True, out_specs=(SPLIT, P("sp"))), "or with P.* after it"),
    "specs without a mesh": (dict(mesh=None, axis_name=None, in_specs=(P(),) * 3), "Pass mesh= too"),
    "no mesh": (dict(mesh=3), r"mesh is int\. Pass a jax\.sharding\.Mesh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_the_mesh_is_refused(name: str):
    options, message = REFUSED[name]
    with pytest.raises((InputError, MeshError), match=message):
        ring_attention(*arrays(18), **{"mesh": mesh_of(data=2, sp=4), "axis_name": "sp"} | options)


def test_a_mesh_inside_shard_map_is_refused():
    mesh = mesh_of(sp=4)
    inner = lambda q, k, v: ring_attention(q, k, v, axis_name="sp", mesh=mesh)  # noqa: E731
    spec = P(None, "sp")
    with pytest.raises(MeshError, match="inside shard_map the arrays are local"):
        jax.shard_map(inner, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(*arrays())


def test_the_gradients_of_repeated_key_heads_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256 again, so that the sum below would be 256."""
    key, parts = jnp.ones((1, 1, 1, 1), jnp.bfloat16), jnp.array([256, 1, 1, 1], jnp.bfloat16)
    repeated, pullback = jax.vjp(lambda x: sharding._repeated(x, 4), key)
    assert repeated.dtype == jnp.bfloat16
    assert pullback(parts.reshape(repeated.shape))[0] == 260
