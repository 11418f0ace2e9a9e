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
from jax.sharding import Mesh
from ringattn_adapters.flax import ring_attention_fn
from ringattn_core import errors

B, T, C, N = 2, 16, 32, 4
X = jax.random.normal(jax.random.key(0), (B, T, C))
KEYS = (jnp.arange(T) < 11)[None, None, None, :]


@pytest.fixture(autouse=True)
def _promotion_of_flax() -> Iterator[None]:
    """Allows promotion, because Flax's own attention mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "sp"))


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


def agree(got: Any, want: Any, atol: float = 5e-5) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        scale = max(1.0, float(np.max(np.abs(np.float32(other)))))
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=0, atol=atol * scale)


BOTH = pytest.mark.parametrize("of", [of_linen, of_nnx], ids=["linen", "nnx"])
CAUSAL = nn.make_causal_mask(X[..., 0])


@pytest.mark.parametrize("where", [{}, {"mesh": mesh, "axis_name": "sp"}], ids=["one device", "mesh"])
@pytest.mark.parametrize("mask", [None, CAUSAL, KEYS], ids=["no mask", "causal mask", "mask of keys"])
@BOTH
def test_a_layer_computes_the_same_with_it_as_without(of: Any, mask: Any, where: dict[str, Any]):
    ring = where | ({"mesh": mesh()} if where else {})
    agree(of(ring_attention_fn(**ring), mask=mask), of(None, mask=mask))


def test_the_mesh_of_set_mesh_is_the_mesh_of_a_layer():
    with jax.set_mesh(mesh()):
        found = of_linen(ring_attention_fn(axis_name="sp", batch_axis_name="data"), mask=KEYS)
    agree(found, of_linen(None, mask=KEYS))


@pytest.mark.parametrize("ring", [False, True])
def test_nnx_is_causal_where_the_layer_or_the_ring_says_so(ring: bool):
    agree(of_nnx(ring_attention_fn(causal=ring), is_causal=not ring), of_nnx(None, is_causal=True))


def test_a_bias_and_mixed_dtypes_are_those_of_flax():
    """The function is called directly here, because the layers of Flax pass no bias."""
    query = jax.random.normal(jax.random.key(3), (B, T, N, 8))
    key, value = (jax.random.normal(jax.random.key(seed), (B, T, N, 8)).astype(jnp.bfloat16) for seed in (4, 5))
    bias = jax.random.normal(jax.random.key(6), (N, T, T))
    got = ring_attention_fn()(query, key, value, bias)
    agree(got, nn.dot_product_attention(query, key, value, bias[None]))
    assert got.dtype == jnp.float32


class TestMixedPrecision:
    """The output has the dtype that Flax's attention gives, for any mixture of input dtypes."""

    MIXED = (jnp.float32, jnp.bfloat16, jnp.bfloat16)

    def arrays(self, dtypes: tuple[Any, ...]) -> list[jax.Array]:
        shape = (B, T, N, 8)
        return [jax.random.normal(jax.random.key(seed), shape).astype(dtype) for seed, dtype in enumerate(dtypes)]

    @pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
    @pytest.mark.parametrize("theirs", [nn.dot_product_attention, nnx.dot_product_attention], ids=["linen", "nnx"])
    def test_dtype_is_that_of_the_computation(self, theirs: Any, dtype: Any):
        arrays = self.arrays(self.MIXED)
        agree(ring_attention_fn()(*arrays, dtype=dtype), theirs(*arrays, dtype=dtype), 4e-2)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
    def test_a_float32_softmax_gives_a_float32_output(self, dtype: Any):
        arrays = self.arrays((dtype,) * 3)
        want = nn.dot_product_attention(*arrays, force_fp32_for_softmax=True)
        got = ring_attention_fn()(*arrays, force_fp32_for_softmax=True)
        assert got.dtype == jnp.float32
        agree(got, want, 4e-2)

    def test_promote_dtype_is_called_as_flax_calls_it(self):
        def half(arrays: tuple[jax.Array, ...], dtype: Any) -> tuple[jax.Array, ...]:
            return tuple(x.astype(jnp.float16) for x in arrays)

        arrays = self.arrays(self.MIXED)
        options = {"promote_dtype": half, "dtype": jnp.float32}
        agree(ring_attention_fn()(*arrays, **options), nnx.dot_product_attention(*arrays, **options), 5e-3)

    @pytest.mark.parametrize(
        ("promote", "fact"),
        [(nn.dtypes.promote_dtype, "does not turn the tuple"), (lambda arrays: arrays, "raised TypeError: .*dtype")],
        ids=["that of Linen", "of another signature"],
    )
    def test_a_promote_dtype_with_another_signature_is_refused(self, promote: Any, fact: str):
        x = X.reshape(B, T, N, -1)
        with pytest.raises(errors.InputError, match=f"promote_dtype: {fact}.* Pass a function of a tuple"):
            ring_attention_fn()(x, x, x, promote_dtype=promote)

    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64], ids=str)
    def test_dtypes_without_a_ring_are_refused(self, dtype: Any):
        x = jnp.ones((B, T, N, 8), dtype)
        with pytest.raises(errors.InputError, match=f"query: has dtype {jnp.dtype(dtype).name}. Cast query, key and"):
            ring_attention_fn()(x, x, x)


def test_a_mask_of_keys_makes_no_array_of_the_square_of_the_length():
    x = jnp.zeros((1, 4096, 1, 8))
    row = jnp.ones((1, 1, 1, 4096))
    assert "4096,4096" not in str(jax.make_jaxpr(lambda x: ring_attention_fn()(x, x, x, mask=row))(x))


class TestDropout:
    LAYER = {"dropout_rate": 0.5, "broadcast_dropout": False}  # noqa: RUF012

    def test_the_key_alone_decides_it(self):
        def out(seed: int, ring: dict[str, Any]) -> jax.Array:
            module = linen(ring_attention_fn(**ring), **self.LAYER)
            parameters = linen().init(jax.random.key(1), X)
            return module.apply(parameters, X, deterministic=False, rngs={"dropout": jax.random.key(seed)})

        one, again, spread, other = out(1, {}), out(1, {}), out(1, {"mesh": mesh(), "axis_name": "sp"}), out(2, {})
        np.testing.assert_array_equal(one, again)
        np.testing.assert_allclose(one, spread, atol=2e-5)
        assert np.max(np.abs(one - other)) > 1e-2

    def test_nnx_draws_a_new_key_at_every_call(self):
        layer = nnx_layer(ring_attention_fn(), **self.LAYER)
        rngs = nnx.Rngs(3)
        one, other = (layer(X, deterministic=False, rngs=rngs) for _ in range(2))
        assert np.max(np.abs(one - other)) > 1e-2
        plain = nnx_layer(ring_attention_fn())
        np.testing.assert_array_equal(layer(X, deterministic=True), plain(X))

    def test_it_needs_a_key(self):
        x = X.reshape(B, T, N, -1)
        with pytest.raises(errors.InputError, match=r"dropout_rng: is missing with a dropout of 0\.5"):
            ring_attention_fn()(x, x, x, **self.LAYER)


class TestWhatItRefuses:
    @pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum", "einsum_dot_general"])
    def test_a_custom_einsum(self, name: str):
        x = X.reshape(B, T, N, -1)
        with pytest.raises(errors.InputError, match=f"{name}: is set, and"):
            ring_attention_fn()(x, x, x, **{name: jnp.einsum})

    @pytest.mark.parametrize("name", ["dropout_rate", "mask", "bias"])
    def test_an_option_that_the_layer_passes(self, name: str):
        with pytest.raises(errors.InputError, match=f"{name}: is no option of this adapter"):
            ring_attention_fn(**{name: None})

    def test_an_option_under_its_name_in_ring_attention(self):
        with pytest.raises(errors.InputError, match=r"attention_mask: has another name here\. Pass mask"):
            ring_attention_fn(attention_mask=CAUSAL)

    @pytest.mark.parametrize(
        ("shape", "fact"),
        [((3, 2, T, N, 8), r"batch axes \(3, 2\) but query has \(2, 3\)"), ((T, N), r"shape \(16, 4\)")],
        ids=["other order", "too few"],
    )
    @pytest.mark.parametrize("name", ["key", "value"])
    def test_batch_axes_that_differ(self, name: str, shape: tuple[int, ...], fact: str):
        arrays = {each: jnp.ones((2, 3, T, N, 8)) for each in ("query", "key", "value")}
        with pytest.raises(errors.InputError, match=f"^{name}: has {fact}"):
            ring_attention_fn()(**arrays | {name: jnp.ones(shape)})

    @pytest.mark.parametrize("shape", [(3, 2, N, T, T), (1, 2, 3, N, T, T)], ids=str)
    @pytest.mark.parametrize("name", ["bias", "mask"])
    def test_a_bias_or_mask_of_other_batch_axes(self, name: str, shape: tuple[int, ...]):
        x = jnp.ones((2, 3, T, N, 8))
        with pytest.raises(errors.InputError, match=rf"{name}: has shape .*It must broadcast to \(\*\(2, 3\), heads"):
            ring_attention_fn()(x, x, x, **{name: jnp.ones(shape)})

    @pytest.mark.parametrize(
        "option", [{"causal": True}, {"sliding_window": 4}, {"sliding_window": 0}, {"chunk_size": 4}], ids=str
    )
    def test_a_decoding_step_with_a_mask_by_position(self, option: dict[str, Any]):
        layer = linen(ring_attention_fn(**option), decode=True)
        parameters = linen(decode=True).init(jax.random.key(1), X)
        with pytest.raises(errors.InputError, match=r"one query against 16 keys, a decoding step\. Decode with"):
            layer.apply(parameters, X[:, :1], mutable=["cache"])


def test_the_precision_option_overrides_that_of_the_layer():
    x = X.reshape(B, T, N, -1)

    def precision(ring: Any, layer: Any) -> str:
        return str(jax.make_jaxpr(lambda x: ring_attention_fn(precision=ring)(x, x, x, precision=layer))(x))

    assert "HIGHEST" not in precision(None, "default") and "HIGHEST" in precision("highest", "default")
    assert "HIGHEST" in precision(None, "highest") and "HIGHEST" not in precision("default", "highest")


@pytest.mark.parametrize("theirs", [nn.dot_product_attention, nnx.dot_product_attention], ids=["linen", "nnx"])
def test_it_names_every_argument_of_flax_in_their_order_with_their_defaults(theirs: Any):
    """Linen silently drops arguments that the function does not name."""
    ours = inspect.signature(ring_attention_fn()).parameters
    wanted = inspect.signature(theirs).parameters
    assert set(wanted) <= set(ours)
    defaults = {name: (ours[name].default, wanted[name].default) for name in set(wanted) - {"promote_dtype"}}
    assert {name: pair for name, pair in defaults.items() if pair[0] is not pair[1] and pair[0] != pair[1]} == {}
    assert list(wanted)[:12] == list(ours)[:12]
