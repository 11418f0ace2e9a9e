# SPDX-License-Identifier: Apache-2.0
"""A wrong argument is answered by one sentence of ours that names it, and not by an error of JAX, NumPy or Python."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import filter_jit
from ringattn_core import FwdParams, Partial, RingAttentionConfig, decode_attention, merge, ring_attention, ring_mesh
from ringattn_core.adapters.equinox import RingMultiheadAttention
from ringattn_core.adapters.flax import ring_attention_fn
from ringattn_core.adapters.jax_nn import dot_product_attention
from ringattn_core.errors import RingAttnError

Q, K = jnp.ones((2, 8, 4, 8)), jnp.ones((2, 8, 2, 8))
X, KEY = jnp.ones((2, 8, 16)), jax.random.key(0)
PART = Partial(jnp.zeros(Q.shape), jnp.zeros((2, 4, 8)))
NUMBERS, LENGTHS = jnp.ones(3), jnp.array([3, 3])
NOT_ARRAY, NOT_KEY, NOT_DTYPE = "str is not an array", "is not one random key", "It needs a dtype of floating-point"


def flax(query: Any = Q, layer: Any = None, **given: Any) -> Callable[[], Any]:
    dropout = {"broadcast_dropout": False} if "dropout_rate" in given else {}
    return lambda: ring_attention_fn(**layer or {})(query, Q, Q, **given | dropout)


def module(**given: Any) -> Callable[[], Any]:
    return lambda: RingMultiheadAttention(**{"num_heads": 4, "query_size": 16, "key": KEY} | given)


def equinox(query: Any = X, dropout: float = 0.0, **given: Any) -> Callable[[], Any]:
    return lambda: module(dropout_p=dropout)()(query, X, X, **given)


def jax_nn(query: Any = Q, **given: Any) -> Callable[[], Any]:
    return lambda: dot_product_attention(query, Q, Q, **given)


def merged(**changes: Any) -> Callable[[], Any]:
    unchecked = inspect.unwrap(merge)  # these tests check types at run time, and users do not
    return lambda: unchecked(PART, Partial(**vars(PART) | changes))


def mesh(devices: Any = None, axis: Any = "sp", **options: Any) -> Callable[[], Any]:
    return lambda: ring_mesh(devices, axis, **options)


FLAX = {
    "a mask that is text": (flax(mask="text"), f"mask: {NOT_ARRAY}"),
    "a mask of text": (flax(mask=np.array(["text"])), "mask: ndarray is not an array"),
    "a bias that is text": (flax(bias="text"), f"bias: {NOT_ARRAY}"),
    "a query that is nothing": (flax(query=None), "query: NoneType is not an array"),
    "a list for a query": (flax(query=[1.0, 2.0]), r"query: has shape \(2,\)"),
    "an unknown dtype": (flax(dtype="zz"), f"dtype: got 'zz'. {NOT_DTYPE}"),
    "a number for a dtype": (flax(dtype=3), f"dtype: got 3. {NOT_DTYPE}"),
    "a dtype of integers": (flax(dtype=jnp.int32), f"dtype: got <class .*. {NOT_DTYPE}"),
    "a number for a key": (flax(dropout_rng=3, dropout_rate=0.5), f"dropout_rng: {NOT_KEY}"),
    "two keys": (flax(dropout_rng=jax.random.split(KEY), dropout_rate=0.5), f"dropout_rng: {NOT_KEY}"),
    "a rate that is text": (flax(dropout_rng=KEY, dropout_rate="text"), "dropout_rate: got 'text'"),
    "several rates": (flax(dropout_rng=KEY, dropout_rate=NUMBERS), r"dropout_rate: got Array"),
    "several flags": (flax(dropout_rng=KEY, dropout_rate=0.5, deterministic=NUMBERS), "deterministic: got Array"),
    "an option that is text": (flax(layer={"causal": "text"}), "causal: got 'text'"),
    "promotion to numbers": (flax(promote_dtype=lambda x, dtype: (1, 2, 3)), r"query: has shape \(\)"),
}
EQUINOX = {
    "a number for the key of parameters": (module(key=3), f"key: {NOT_KEY}"),
    "no key of parameters": (module(key=None), f"key: {NOT_KEY}"),
    "two keys of parameters": (module(key=jax.random.split(KEY)), f"key: {NOT_KEY}"),
    "heads that are text": (module(num_heads="text"), "num_heads: got 'text'. It needs an integer of 1 or more"),
    "half a head": (module(num_heads=2.5), "num_heads: got 2.5. It needs an integer"),
    "more heads than features": (module(num_heads=32), "num_heads: got 32 for a query_size of"),
    "key heads that are text": (module(num_key_heads="text"), "num_key_heads: got 'text'"),
    "a negative size": (module(query_size=-4), "query_size: got -4"),
    "a size of keys that is text": (module(key_size="text"), "key_size: got 'text'"),
    "a size of values that is broken": (module(vo_size=1.5), "vo_size: got 1.5"),
    "a size of outputs that is text": (module(output_size="text"), "output_size: got 'text'"),
    "an unknown dtype of parameters": (module(dtype="zz"), f"dtype: got 'zz'. {NOT_DTYPE}"),
    "parameters that are integers": (module(dtype=jnp.int32), f"dtype: got <class .*. {NOT_DTYPE}"),
    "a query that is text": (equinox(query="text"), f"query: {NOT_ARRAY}"),
    "no query": (equinox(query=None), "query: NoneType is not an array"),
    "a mask that is text": (equinox(mask="text"), f"mask: {NOT_ARRAY}"),
    "a number for a key": (equinox(dropout=0.5, key=3), f"key: {NOT_KEY}"),
    "a rate that is text": (equinox(dropout="text", key=KEY), "dropout_p: got 'text'"),  # pyright: ignore[reportArgumentType]
    "several flags": (equinox(dropout=0.5, key=KEY, inference=NUMBERS), "inference: got Array"),
    "no function of heads": (equinox(process_heads=3), "process_heads: does not turn query, key and value heads into"),
    "a function that loses heads": (equinox(process_heads=lambda q, k, v: q), "process_heads: does not turn"),
    "ids that are text": (
        lambda: module()()(X[0], X[0], X[0], q_segment_ids="text"), "q_segment_ids: has dtype <U4. It needs integers"
    ),
}  # fmt: skip
JAX_NN = {
    "a query that is text": (jax_nn(query="text"), f"query: {NOT_ARRAY}"),
    "a bias that is text": (jax_nn(bias="text"), f"bias: {NOT_ARRAY}"),
    "a mask of five axes": (jax_nn(mask=jnp.ones((1, 1, 1, 8, 8), bool)), r"mask: has shape \(1, 1, 1, 8, 8\)"),
    "lengths that are text": (jax_nn(query_seq_lengths="text"), f"query_seq_lengths: {NOT_ARRAY}"),
    "lengths of nothing": (jax_nn(query_seq_lengths=[None]), "query_seq_lengths: list is not an array"),
    "a number for a mesh": (jax_nn(mesh=3, axis_name="sp", query_seq_lengths=LENGTHS), "mesh is int. Pass a jax"),
    "ids that are text": (jax_nn(q_segment_ids="text", query_seq_lengths=LENGTHS), "q_segment_ids: has dtype <U4"),
    "ids of another shape": (
        jax_nn(q_segment_ids=jnp.ones((3, 3), jnp.int32), query_seq_lengths=LENGTHS),
        r"q_segment_ids: has shape \(3, 3\). It needs \(2, 8\)",
    ),
}
OTHERS = {
    "out_specs of nothing": (
        lambda: ring_attention(Q, K, K, mesh=ring_mesh(), axis_name="sp", layout="contiguous", out_specs=()),
        r"out_specs=\(\) must be P.*, the spec of the query",
    ),
    "a partial result of text": (merged(out="text"), f"b: {NOT_ARRAY}"),
    "devices that are nothing": (mesh([None]), r"devices=\[None\] are not devices"),
    "a number for an axis": (mesh(axis=3), "the axis name 3 is int. Pass a string"),
    "a list for an axis": (mesh(axis=["sp"]), r"the axis name \['sp'\] is list. Pass a string"),
    "a number among the axes": (mesh(axis_sizes={"sp": 8, 3: 1}), "the axis name 3 is int"),
    "values without names": (lambda: FwdParams.of({"blocksize_m": 3, "extra": 5}), "FwdParams.extra: got 5"),
    "a number for JSON": (lambda: RingAttentionConfig.from_json(3), "RingAttentionConfig: not JSON: "),  # pyright: ignore[reportArgumentType]
}
TABLES = {"flax": FLAX, "equinox": EQUINOX, "jax_nn": JAX_NN, "other": OTHERS}


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, calls in TABLES.items() for name in calls])
def test_a_wrong_argument_is_named_in_one_sentence(table: str, name: str):
    call, message = TABLES[table][name]
    with pytest.raises(RingAttnError, match=f"^{message}"):
        call()


def test_arrays_on_different_devices_are_refused_by_name():
    """Without a mesh nothing says where the call should run."""
    first, second = (lambda x, device=device: jax.device_put(x, device) for device in jax.devices()[:2])
    q, k, bias = first(Q), first(K), second(jnp.ones((1, 1, 8, 8)))
    names = [re.escape(str(device)) for device in jax.devices()[:2]]
    at = rf"is on {names[1]}, but query is on {names[0]}\. Put all arrays on the same devices, with jax.device_put"
    for call, argument in (
        (lambda: ring_attention(q, second(K), k), "key"),
        (lambda: ring_attention(q, k, k, bias=bias), "bias"),
        (lambda: decode_attention(q, k, second(K), 8), "value_cache"),
        (lambda: decode_attention(q, k, k, second(LENGTHS)), "lengths"),
    ):
        with pytest.raises(RingAttnError, match=f"^{argument}: {at}"):
            call()
    with pytest.raises(RingAttnError, match=f"^b: is on {names[1]}, but a is on {names[0]}"):
        merge(first(PART), second(PART))


def test_a_traced_program_may_hold_arrays_of_any_device_as_constants():
    key, slopes = (jax.device_put(jnp.ones(shape), jax.devices()[n]) for n, shape in ((1, (2, 8, 4, 8)), (0, (4,))))
    query = jnp.ones((2, 8, 4, 8))
    jax.eval_shape(lambda query: ring_attention(query, key, key, alibi_slopes=slopes), query)
    out = jax.jit(lambda query: ring_attention(query, key, key, alibi_slopes=slopes))(query)
    np.testing.assert_allclose(out, np.ones_like(out), atol=1e-6)


def test_without_a_rate_the_switch_of_dropout_may_be_anything():
    layer = RingMultiheadAttention(4, 16, dropout_p=0, key=jax.random.key(0))
    x = jnp.ones((8, 16))
    filter_jit(lambda layer, off: layer(x, x, x, key=jax.random.key(1), inference=off))(layer, jnp.bool_(True))
    attend, q = ring_attention_fn(causal=None), jnp.ones((2, 8, 4, 8))
    jax.jit(lambda off: attend(q, q, q, dropout_rate=0, deterministic=off))(True)


def test_process_heads_may_return_any_three_arrays():
    layer = RingMultiheadAttention(4, 16, key=jax.random.key(0))
    x = jnp.ones((8, 16))
    wanted = layer(x, x, x)
    for process in (lambda *heads: (one for one in heads), lambda *heads: jnp.stack(heads)):
        np.testing.assert_array_equal(layer(x, x, x, process_heads=process), wanted)


def test_arrays_that_the_caller_has_put_nowhere_go_to_the_others():
    other = jax.devices()[1]
    q, k = (jax.device_put(x, other) for x in (Q, K))
    assert ring_attention(q, k, k, bias=jnp.ones((1, 1, 8, 8)), alibi_slopes=np.ones(4, np.float32)).device == other
