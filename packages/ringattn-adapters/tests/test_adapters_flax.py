# SPDX-License-Identifier: Apache-2.0
"""Promises of the `attention_fn` for Flax: Linen and NNX layers compute the same with it as without, or it raises."""

import inspect
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ringattn_adapters.flax import ring_attention_fn
from ringattn_core import errors
from ringattn_testing.agreement import agree, mesh, normal

B, T, C, N = 2, 16, 32, 4
X = jax.random.normal(jax.random.key(0), (B, T, C))
KEYS = (jnp.arange(T) < 11)[None, None, None, :]


@pytest.fixture(autouse=True)
def _promotion_of_flax() -> Iterator[None]:
    """Allows promotion, because Flax's own attention mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def linen(attention_fn: Any = None, **options: Any) -> Any:
    given = {} if attention_fn is None else {"attention_fn": attention_fn}
    return nn.MultiHeadDotProductAttention(N, **given, **options)


def nnx_layer(attention_fn: Any = None, **options: Any) -> Any:
    given = {} if attention_fn is None else {"attention_fn": attention_fn}
    return nnx.MultiHeadAttention(N, C, **({"decode": False} | options), **given, rngs=nnx.Rngs(0))


def of_linen(attention_fn: Any, x: jax.Array = X, layer: Any = None, **call: Any) -> Any:
    """The output of a Linen layer, and the gradients of its parameters and its input."""
    module = linen(attention_fn, **(layer or {}))
    parameters = linen(**(layer or {})).init(jax.random.key(1), x, **{k: v for k, v in call.items() if k == "mask"})

    def loss(parameters: Any, x: jax.Array) -> Any:
        out = module.apply(parameters, x, **call)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters, x)
    return out, gradients


def of_nnx(attention_fn: Any, x: jax.Array = X, layer: Any = None, **call: Any) -> Any:
    structure, parameters = nnx.split(nnx_layer(attention_fn, **(layer or {})))

    def loss(parameters: Any, x: jax.Array) -> Any:
        out = nnx.merge(structure, parameters)(x, **call)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters, x)
    return out, jax.tree.leaves(gradients)


CAUSAL = nn.make_causal_mask(X[..., 0])


@pytest.mark.parametrize(
    ("of", "mask"),
    [(of_linen, None), (of_linen, CAUSAL), (of_linen, KEYS), (of_nnx, KEYS)],
    ids=["linen, no mask", "linen, causal mask", "linen, mask of keys", "nnx, mask of keys"],
)
def test_a_layer_computes_the_same_over_a_ring_as_without(of: Any, mask: Any):
    agree(of(ring_attention_fn(mesh=mesh(), axis_name="sp"), mask=mask), of(None, mask=mask))


def test_the_mesh_of_set_mesh_is_the_mesh_of_a_layer():
    with jax.set_mesh(mesh()):
        found = of_linen(ring_attention_fn(axis_name="sp", batch_axis_name="data"), mask=KEYS)
    agree(found, of_linen(None, mask=KEYS))


@pytest.mark.parametrize("shape", [(4, 2, 3, 8), (6, 8)], ids=str)
def test_a_layer_takes_any_number_of_batch_axes(shape: tuple[int, ...]):
    agree(of_linen(ring_attention_fn(), normal(0, *shape)), of_linen(None, normal(0, *shape)))


def test_query_heads_share_key_heads_of_another_length():
    arrays = normal(0, B, T, N, 8), normal(1, B, 5, 2, 8), normal(2, B, 5, 2, 8)
    agree(ring_attention_fn()(*arrays), nnx.dot_product_attention(*arrays))


def test_decoding_token_by_token_gives_the_causal_result():
    decoder = linen(ring_attention_fn(), decode=True)
    variables = decoder.init(jax.random.key(1), X)
    want = linen().apply({"params": variables["params"]}, X, mask=CAUSAL)
    step = jax.jit(lambda variables, token: decoder.apply(variables, token, mutable=["cache"]))
    outs = []
    for at in range(T):
        out, cache = step(variables, X[:, at : at + 1])
        variables = {**variables, **cache}
        outs.append(out)
    agree(jnp.concatenate(outs, 1), want)


def test_dropout_follows_its_key_and_reads_none_where_it_is_switched_off():
    dropping, off = (
        linen(ring_attention_fn(), dropout_rate=0.5, broadcast_dropout=False, deterministic=deterministic)
        for deterministic in (False, True)
    )
    keys = jax.random.split(jax.random.key(0), 4)
    parameters = dropping.init({"params": keys[0], "dropout": keys[1]}, X)
    a, again, other = (dropping.apply(parameters, X, rngs={"dropout": key}) for key in (keys[2], keys[2], keys[3]))
    assert (a == again).all() and not (a == other).all()
    np.testing.assert_array_equal(off.apply(parameters, X), linen(ring_attention_fn()).apply(parameters, X))


@pytest.mark.parametrize("ring", [False, True])
def test_nnx_is_causal_where_the_layer_or_the_ring_says_so(ring: bool):
    agree(of_nnx(ring_attention_fn(causal=ring), is_causal=not ring), of_nnx(None, is_causal=True))


class TestMixedPrecision:
    """The output has the dtype that Flax's attention gives, for any mixture of input dtypes."""

    MIXED = (jnp.float32, jnp.bfloat16, jnp.bfloat16)

    def arrays(self, *dtypes: Any) -> list[jax.Array]:
        return [jax.random.normal(jax.random.key(seed), (B, T, N, 8)).astype(x) for seed, x in enumerate(dtypes)]

    def test_a_bias_is_that_of_flax(self):
        """The function is called directly here, because the layers of Flax pass no bias."""
        arrays, bias = self.arrays(*self.MIXED), jax.random.normal(jax.random.key(6), (N, T, T))
        agree(ring_attention_fn()(*arrays, bias), nn.dot_product_attention(*arrays, bias[None]))

    @pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
    def test_dtype_is_that_of_the_computation(self, dtype: Any):
        arrays = self.arrays(*self.MIXED)
        for theirs in (nn.dot_product_attention, nnx.dot_product_attention):
            agree(ring_attention_fn()(*arrays, dtype=dtype), theirs(*arrays, dtype=dtype), 4e-2)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
    def test_a_float32_softmax_gives_a_float32_output(self, dtype: Any):
        arrays = self.arrays(*[dtype] * 3)
        got = ring_attention_fn()(*arrays, force_fp32_for_softmax=True)
        assert got.dtype == jnp.float32
        agree(got, nn.dot_product_attention(*arrays, force_fp32_for_softmax=True), 4e-2)


Q = X.reshape(B, T, N, -1)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mask that is text": ({"mask": "text"}, "mask: str is not an array"),
    "a dtype of integers": ({"dtype": jnp.int32}, "dtype: got .* It needs a dtype of floating-point"),
    "integers": (dict.fromkeys(("query", "key", "value"), Q.astype(int)), "query: has dtype int32. Cast query"),
    "no key": ({"dropout_rate": 0.5, "broadcast_dropout": False}, "dropout_rng: is missing with a dropout of 0.5"),
    "a rate that is text": (
        {"dropout_rng": jax.random.key(0), "dropout_rate": "text", "broadcast_dropout": False}, "dropout_rate: got"
    ),
    "promotion of another signature": ({"promote_dtype": nn.dtypes.promote_dtype}, "promote_dtype: does not turn the"),
    "a mask of other batch axes": ({"mask": jnp.ones((3, N, T, T))}, "mask: has shape .*It must broadcast to"),
    "a function for the weights": ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum: is set, and"),
    "sown weights": ({"module": object()}, r"module \(sow_weights=True\): is set, and"),
    "one dropout for all heads": (
        {"dropout_rng": jax.random.key(0), "dropout_rate": 0.1}, "broadcast_dropout: is True"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_named(name: str):
    given, message = REFUSED[name]
    with pytest.raises(errors.InputError, match=message):
        ring_attention_fn()(**{"query": Q, "key": Q, "value": Q} | given)


class TestWhatItRefuses:
    @pytest.mark.parametrize("name", ["dropout_rate", "mask", "bias"])
    def test_an_option_that_the_layer_passes(self, name: str):
        with pytest.raises(errors.InputError, match=f"{name}: is no option of this adapter"):
            ring_attention_fn(**{name: None})

    @pytest.mark.parametrize("option", [{"causal": True}, {"sliding_window": 0}], ids=str)
    def test_a_decoding_step_with_a_mask_by_position(self, option: dict[str, Any]):
        layer = linen(ring_attention_fn(**option), decode=True)
        parameters = linen(decode=True).init(jax.random.key(1), X)
        with pytest.raises(errors.InputError, match=r"one query against 16 keys, a decoding step\. Decode with"):
            layer.apply(parameters, X[:, :1], mutable=["cache"])


@pytest.mark.parametrize("theirs", [nn.dot_product_attention, nnx.dot_product_attention], ids=["linen", "nnx"])
def test_it_names_every_argument_of_flax_in_their_order_with_their_defaults(theirs: Any):
    """Linen silently drops arguments that the function does not name."""
    ours = inspect.signature(ring_attention_fn()).parameters
    wanted = inspect.signature(theirs).parameters
    assert set(wanted) <= set(ours)
    defaults = {name: (ours[name].default, wanted[name].default) for name in set(wanted) - {"promote_dtype"}}
    assert {name: pair for name, pair in defaults.items() if pair[0] is not pair[1] and pair[0] != pair[1]} == {}
    assert list(wanted)[:12] == list(ours)[:12]
