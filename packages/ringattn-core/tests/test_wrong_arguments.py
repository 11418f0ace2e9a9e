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
from ringattn_core import FwdParams, Partial, RingAttentionConfig, decode_attention, merge, ring_attention, ring_mesh
from ringattn_core.errors import RingAttnError

Q, K = jnp.ones((2, 8, 4, 8)), jnp.ones((2, 8, 2, 8))
PART = Partial(jnp.zeros(Q.shape), jnp.zeros((2, 4, 8)))
NUMBERS, LENGTHS = jnp.ones(3), jnp.array([3, 3])
NOT_ARRAY = "str is not an array"


def merged(**changes: Any) -> Callable[[], Any]:
    unchecked = inspect.unwrap(merge)  # these tests check types at run time, and users do not
    return lambda: unchecked(PART, Partial(**vars(PART) | changes))


def mesh(devices: Any = None, axis: Any = "sp", **options: Any) -> Callable[[], Any]:
    return lambda: ring_mesh(devices, axis, **options)


WRONG = {
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


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_in_one_sentence(name: str):
    call, message = WRONG[name]
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


def test_arrays_that_the_caller_has_put_nowhere_go_to_the_others():
    other = jax.devices()[1]
    q, k = (jax.device_put(x, other) for x in (Q, K))
    assert ring_attention(q, k, k, bias=jnp.ones((1, 1, 8, 8)), alibi_slopes=np.ones(4, np.float32)).device == other
