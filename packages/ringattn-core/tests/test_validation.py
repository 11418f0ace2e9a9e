# SPDX-License-Identifier: Apache-2.0
"""Validation refuses bad input with one error that names the argument, the value and the remedy."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P
from ringattn_core import MaskInfo, decode_attention, ring_attention
from ringattn_core.call.validation import validated
from ringattn_core.errors import InputError, MeshError
from ringattn_core.masks import Causal, Document, Predicate, Reach

B, T, N, K, H = 2, 8, 4, 2, 8


def arrays(length: int = T, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    return tuple(jnp.ones((B, length, heads, H), dtype) for heads in (N, K, K))  # pyright: ignore[reportReturnType]


def ones(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


OPERANDS = {
    "query of three axes": ((ones(B, T, H), *arrays()[1:]), "query: has shape (2, 8, 8). It needs (B, T, N, H)"),
    "an empty key": ((arrays()[0], ones(B, 0, K, H), ones(B, 0, K, H)), "key: has shape (2, 0, 2, 8), which is empty"),
    "integers": (arrays(dtype=jnp.int32), "query: has dtype int32"),
    "mixed dtypes": ((*arrays()[:2], ones(B, T, K, H, dtype=jnp.bfloat16)), "value: has dtype bfloat16 but query has"),
    "head sizes that differ": ((arrays()[0], ones(B, T, K, 4), arrays()[2]), "key: has shape (2, 8, 2, 4). It needs"),
    "fewer values than keys": ((*arrays()[:2], ones(B, 7, K, H)), "value: has shape (2, 7, 2, 8). It needs (2, 8, 2,"),
    "heads that do not divide": ((arrays()[0], ones(B, T, 3, H), ones(B, T, 3, H)), "key: has 3 heads, which do not"),
    "objects": ((np.array([None]), *arrays()[1:]), "query: ndarray is not an array (TypeError: "),
    "sinks of key heads": ((*arrays(), ones(K, 2)), "softmax_aux: has shape (2, 2)"),
    "bias of one column": ((*arrays(), None, ones(B, N, T, 1)), "bias: has shape (2, 4, 8, 1)"),
    "bias of booleans": ((*arrays(), None, ones(B, N, T, T, dtype=bool)), "bias: has dtype bool"),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_no_backend_could_use_are_refused(name: str):
    operands, message = OPERANDS[name]
    with pytest.raises(InputError) as error:
        ring_attention(*operands)
    assert message in str(error.value)


OPTIONS = {
    "negative window": (dict(sliding_window=-1), "sliding_window: got -1"),
    "window of three sides": (dict(sliding_window=(1, 2, 3)), "sliding_window: got (1, 2, 3)"),
    "chunk of zero": (dict(chunk_size=0), "chunk_size: got 0"),
    "soft cap that leaves float32 no digits": (dict(logits_soft_cap=1e31), "logits_soft_cap: got 1e+31"),
    "scale beyond float32": (dict(softmax_scale=-(10**400)), "softmax_scale: got -1000"),
    "dropout of one": (dict(dropout_prob=1.0, dropout_seed=0), "dropout_prob: got 1.0"),
    "dropout below its resolution": (dict(dropout_prob=1e-5, dropout_seed=0), "dropout_prob: got 1e-05"),
    "dropout without a seed": (dict(dropout_prob=0.1), "dropout_seed: is missing with dropout_prob=0.1"),
    "a fraction as seed": (dict(dropout_prob=0.1, dropout_seed=0.5), "dropout_seed: has dtype float64."),
    "a seed beyond 32 bits, without dropout": (dict(dropout_seed=2**32), "dropout_seed: has the value 4294967296"),
    "a key as seed": (lambda: dict(dropout_prob=0.1, dropout_seed=jax.random.key(0)), "dropout_seed: has dtype key"),
    "unknown precision": (dict(precision="sloppy"), "precision: got 'sloppy'"),
    "segment ids of floats": (dict(q_segment_ids=ones(B, T)), "q_segment_ids: has dtype float32"),
    "segment ids that would wrap": (
        dict(q_segment_ids=jnp.full((B, T), 2**31 + 1, jnp.uint32)), "q_segment_ids: has the value 2147483649"
    ),
    "positions of 2^30": (dict(q_positions=np.arange(T) + 2**30), "q_positions: has values from 1073741824"),
    "positions on the device": (
        lambda: dict(q_positions=jnp.zeros(T, int), kv_positions=jnp.full(T, -(2**30))), "kv_positions: has the value"
    ),
    "slopes for key heads": (dict(alibi_slopes=ones(K)), "alibi_slopes: has shape (2,)"),
    "mask of numbers": (dict(attention_mask=ones(1, 1, T, T)), "attention_mask: has dtype float32"),
    "mask of one row": (dict(attention_mask=np.ones((1, 1, 1, T), bool)), "attention_mask: has shape (1, 1, 1, 8)"),
    "mask builder of nothing": (dict(mask_builder=lambda *_: None), "mask_builder: returned NoneType"),
    "mask of another shape": (dict(mask_builder=lambda *_: np.ones((T, 3), bool)), "returned a mask of shape (8, 3)"),
    "documents of another length": (
        dict(mask_builder=lambda *_: Causal() & Document(np.zeros(5, int))), "returned a mask of shape (5, 5)"
    ),
    "predicate of numbers": (
        dict(mask_builder=lambda *_: Predicate(lambda i, j: jnp.where(i < j, -jnp.inf, 0.0))),
        "It needs booleans, true where a query sees a key",
    ),
    "predicate of another shape": (
        dict(mask_builder=lambda *_: Predicate(lambda i, j: jnp.ones((3, 5), bool))),
        "returned bool of shape (3, 5). It needs booleans",
    ),
    "mask_info and ids": (
        dict(mask_info=MaskInfo.from_segments(np.zeros((B, T), int)), q_segment_ids=np.zeros((B, T), int)),
        "q_segment_ids: is given twice",
    ),
    "cfg of another kind": (dict(cfg="fast"), "cfg: got str"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_make_no_sense_are_refused(name: str):
    options, message = OPTIONS[name]
    with pytest.raises(InputError) as error:
        ring_attention(*arrays(), **(options() if callable(options) else options))
    assert message in str(error.value)


@pytest.mark.parametrize("argument", ["q_segment_ids", "kv_positions"])
def test_one_side_given_alone_needs_as_many_queries_as_keys(argument: str):
    q, (_, k, v) = arrays(4)[0], arrays(6)
    with pytest.raises(InputError, match=f"{argument}: is given alone, but there are 4 queries and 6 keys"):
        ring_attention(q, k, v, **{argument: np.zeros((B, 4 if argument.startswith("q_") else 6), int)})


def test_seeds_of_32_bits_are_kept_as_they_are():
    seeds = {3: 3, -1: 2**32 - 1, 2**32 - 1: 2**32 - 1}
    for given, bits in seeds.items():
        for x in (given, np.int64(given), jnp.asarray(given % 2**32, jnp.uint32)):
            call = validated(*arrays(), dropout_prob=0.5, dropout_seed=x)
            assert call.dropout_seed is not None and call.dropout_seed.dtype == jnp.uint32
            assert int(call.dropout_seed) == bits


def test_a_traced_option_is_refused_by_name():
    with pytest.raises(InputError, match="sliding_window: is traced"):
        jax.jit(lambda window: ring_attention(*arrays(), sliding_window=window))(3)


def test_an_axis_outside_any_shard_map_is_an_error_that_says_so():
    with pytest.raises(MeshError, match="axis_name='sp' is not an axis of any shard_map"):
        ring_attention(*arrays(), axis_name="sp")


def test_an_unknown_axis_is_an_error_that_lists_the_axes():
    mesh, spec = jax.sharding.Mesh(jax.devices()[:4], ("sp",)), P(None, "sp")
    attend = jax.shard_map(lambda *x: ring_attention(*x, axis_name="ring"), mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(MeshError, match="'ring' is not an axis of the surrounding shard_map, whose axes are 'sp'"):
        attend(*arrays())


@pytest.mark.parametrize("huge", [2**31, 10**12])
def test_windows_and_chunks_beyond_int32_are_no_limit(huge: int):
    """Which keys the widest window of int32 lets a query see is tested in `test_bounds.py`."""
    assert validated(*arrays(), sliding_window=huge, causal=True).reach == Reach(causal=True)
    assert validated(*arrays(), chunk_size=huge).reach == Reach(chunk=2**30)


@pytest.mark.parametrize("axis", [0, [1], ("sp", "sp")])
def test_axis_names_must_be_different_strings(axis: Any):
    with pytest.raises(MeshError, match=r"axis_name=.* does not name mesh axes\. Pass a name, or several"):
        ring_attention(*arrays(), axis_name=axis)


def test_symbolic_sizes_are_refused():
    batch, tokens = export.symbolic_shape("b, 8*t")
    x = jax.ShapeDtypeStruct((batch, tokens, 4, 8), jnp.float32)
    with pytest.raises(
        InputError, match=r"query: has shape \(b, 8\*t, 4, 8\), with symbolic sizes. Export one program"
    ):
        export.export(jax.jit(lambda x: ring_attention(x, x, x)))(x)


Q, KV = ones(B, T, N, H), ones(B, T, K, H)


def test_arrays_on_different_devices_are_refused_by_name():
    """Without a mesh nothing says where the call should run."""
    first, second = (lambda x, device=device: jax.device_put(x, device) for device in jax.devices()[:2])
    q, k = first(Q), first(KV)
    names = [re.escape(str(device)) for device in jax.devices()[:2]]
    for call, argument in (
        (lambda: ring_attention(q, second(KV), k), "key"),
        (lambda: ring_attention(q, k, k, bias=second(ones(1, 1, T, T))), "bias"),
        (lambda: decode_attention(q, k, k, second(jnp.array([3, 3]))), "lengths"),
    ):
        with pytest.raises(InputError, match=rf"^{argument}: is on {names[1]}, but query is on {names[0]}"):
            call()


def test_a_traced_program_may_hold_arrays_of_any_device_as_constants():
    key, slopes = (jax.device_put(jnp.ones(shape), jax.devices()[n]) for n, shape in ((1, (2, 8, 4, 8)), (0, (4,))))
    query = jnp.ones((2, 8, 4, 8))
    jax.eval_shape(lambda query: ring_attention(query, key, key, alibi_slopes=slopes), query)
    out = jax.jit(lambda query: ring_attention(query, key, key, alibi_slopes=slopes))(query)
    np.testing.assert_allclose(out, np.ones_like(out), atol=1e-6)


def test_arrays_that_the_caller_has_put_nowhere_go_to_the_others():
    other = jax.devices()[1]
    q, k = (jax.device_put(x, other) for x in (Q, KV))
    assert ring_attention(q, k, k, bias=jnp.ones((1, 1, 8, 8)), alibi_slopes=np.ones(4, np.float32)).device == other
