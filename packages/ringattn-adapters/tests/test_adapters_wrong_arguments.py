# SPDX-License-Identifier: Apache-2.0
"""A wrong argument of an adapter is answered by one sentence of ours that names it as the library does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import filter_jit
from ringattn_adapters.equinox import RingMultiheadAttention
from ringattn_adapters.flax import ring_attention_fn
from ringattn_adapters.jax_nn import dot_product_attention
from ringattn_core.errors import RingAttnError

Q, X, KEY = jnp.ones((2, 8, 4, 8)), jnp.ones((2, 8, 16)), jax.random.key(0)
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


FLAX = {
    "a mask that is text": (flax(mask="text"), f"mask: {NOT_ARRAY}"),
    "a bias that is text": (flax(bias="text"), f"bias: {NOT_ARRAY}"),
    "a query that is nothing": (flax(query=None), "query: NoneType is not an array"),
    "an unknown dtype": (flax(dtype="zz"), f"dtype: got 'zz'. {NOT_DTYPE}"),
    "a dtype of integers": (flax(dtype=jnp.int32), f"dtype: got <class .*. {NOT_DTYPE}"),
    "a number for a key": (flax(dropout_rng=3, dropout_rate=0.5), f"dropout_rng: {NOT_KEY}"),
    "a rate that is text": (flax(dropout_rng=KEY, dropout_rate="text"), "dropout_rate: got 'text'"),
    "several flags": (flax(dropout_rng=KEY, dropout_rate=0.5, deterministic=NUMBERS), "deterministic: got Array"),
    "an option that is text": (flax(layer={"causal": "text"}), "causal: got 'text'"),
    "promotion to numbers": (flax(promote_dtype=lambda x, dtype: (1, 2, 3)), r"query: has shape \(\)"),
}
EQUINOX = {
    "a number for the key of parameters": (module(key=3), f"key: {NOT_KEY}"),
    
    "heads that are text": (module(num_heads="text"), "num_heads: got 'text'. It needs an integer of 1 or more"),
    "more heads than features": (module(num_heads=32), "num_heads: got 32 for a query_size of"),
    "a negative size": (module(query_size=-4), "query_size: got -4"),
    "a size of keys that is text": (module(key_size="text"), "key_size: got 'text'"),
    
    "an unknown dtype of parameters": (module(dtype="zz"), f"dtype: got 'zz'. {NOT_DTYPE}"),
    "a query that is text": (equinox(query="text"), f"query: {NOT_ARRAY}"),
    "a mask that is text": (equinox(mask="text"), f"mask: {NOT_ARRAY}"),
    "a number for a key": (equinox(dropout=0.5, key=3), f"key: {NOT_KEY}"),
    "a rate that is text": (equinox(dropout="text", key=KEY), "dropout_p: got 'text'"),  # pyright: ignore[reportArgumentType]
    "several flags": (equinox(dropout=0.5, key=KEY, inference=NUMBERS), "inference: got Array"),
    "no function of heads": (equinox(process_heads=3), "process_heads: does not turn query, key and value heads into"),
    "ids that are text": (
        lambda: module()()(X[0], X[0], X[0], q_segment_ids="text"), f"q_segment_ids: {NOT_ARRAY}"
    ),
}  # fmt: skip
JAX_NN = {
    "a query that is text": (jax_nn(query="text"), f"query: {NOT_ARRAY}"),
    "a bias that is text": (jax_nn(bias="text"), f"bias: {NOT_ARRAY}"),
    "a mask of five axes": (jax_nn(mask=jnp.ones((1, 1, 1, 8, 8), bool)), r"mask: has shape \(1, 1, 1, 8, 8\)"),
    "lengths that are text": (jax_nn(query_seq_lengths="text"), f"query_seq_lengths: {NOT_ARRAY}"),
    "a number for a mesh": (jax_nn(mesh=3, axis_name="sp", query_seq_lengths=LENGTHS), "mesh is int. Pass a jax"),
    "ids that are text": (jax_nn(q_segment_ids="text", query_seq_lengths=LENGTHS), f"q_segment_ids: {NOT_ARRAY}"),
    "ids of another shape": (
        jax_nn(q_segment_ids=jnp.ones((3, 3), jnp.int32), query_seq_lengths=LENGTHS),
        r"q_segment_ids: has shape \(3, 3\) and dtype int32. It needs integers of shape \(2, 8\)",
    ),
    "ids beyond int32": (
        jax_nn(q_segment_ids=np.full((2, 8), 2**40), query_seq_lengths=LENGTHS),
        "q_segment_ids: has values outside int32",
    ),
}
TABLES = {"flax": FLAX, "equinox": EQUINOX, "jax_nn": JAX_NN}


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, calls in TABLES.items() for name in calls])
def test_a_wrong_argument_is_named_in_one_sentence(table: str, name: str):
    call, message = TABLES[table][name]
    with pytest.raises(RingAttnError, match=f"^{message}"):
        call()


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
