# SPDX-License-Identifier: Apache-2.0
"""The attention tests of JAX and Flax pass through the adapters, or the adapter refuses with a reason.

The installed packages bring no tests, so the cases are written anew: those of `dot_product_attention` in JAX's
`tests/nn_test.py`, and of attention in Flax's `tests/linen/linen_attention_test.py`, `tests/nnx/nn/attention_test.py`
and `tests/nnx/nn/gqa_test.py`. Tests there that call no attention function (masks made by helpers, warnings about
renamed arguments, which random state a layer keeps) have no case here.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import normal
from flax import nnx
from ringattn_adapters.flax import ring_attention_fn
from ringattn_adapters.jax_nn import dot_product_attention
from ringattn_core.errors import BackendNotFoundError, InputError

B, T, N, H = 2, 32, 4, 8
LENGTHS = {
    "query_seq_lengths": jnp.array([T // 2, T // 4], jnp.int32),
    "key_value_seq_lengths": jnp.array([T // 4, T // 2], jnp.int32),
}
LOWER = jnp.tril(jnp.ones((1, 1, T, T), bool))


@pytest.fixture(autouse=True)
def _promotion_of_the_libraries() -> Iterator[None]:
    """Allows promotion, because both libraries mix dtypes in their own functions."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def close(got: Any, want: Any, atol: float) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=atol, atol=atol)


class TestOfJax:
    """Compares the output, and the gradients for a random cotangent, within the tolerance of JAX's tests."""

    def agree(self, ours: Callable[..., Any], theirs: Callable[..., Any], *arrays: jax.Array, atol: float) -> None:
        cotangent = normal(9, *arrays[0].shape, dtype=arrays[0].dtype)

        def both(function: Callable[..., Any]) -> Any:
            out, transposed = jax.vjp(function, *arrays)
            return out, transposed(cotangent)

        close(jax.jit(both, static_argnums=0)(ours), both(theirs), atol)

    @pytest.mark.parametrize("vmapped", [False, True], ids=["batch", "vmap"])
    @pytest.mark.parametrize(
        ("dtype", "group"),
        [(jnp.bfloat16, 1), (jnp.float16, 2), (jnp.bfloat16, 4)],
        ids=["bfloat16-1", "float16-2", "bfloat16-4"],
    )
    def test_key_heads_of_groups_are_those_repeated(self, dtype: Any, group: int, vmapped: bool):
        arrays = [normal(seed, B, T, heads, H, dtype=dtype) for seed, heads in enumerate((N, N // group, N // group))]

        def repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q, jnp.repeat(k, group, 2), jnp.repeat(v, group, 2))

        ours = jax.vmap(dot_product_attention) if vmapped else dot_product_attention
        self.agree(ours, repeated, *arrays, atol=0.02)

    @pytest.mark.parametrize(
        "options",
        [
            {"is_causal": True},
            LENGTHS,
            {"mask": LOWER},
            {"is_causal": True} | LENGTHS,
            {"mask": LOWER} | LENGTHS,
            {"is_causal": True, "local_window_size": (3, 2)},
        ],
        ids=["causal", "lengths", "mask", "causal-lengths", "mask-lengths", "causal-window"],
    )
    def test_masks_and_lengths_combine(self, options: dict[str, Any]):
        arrays = [normal(seed, B, T, N, H, dtype=jnp.bfloat16) for seed in range(3)]
        ours, theirs = (functools.partial(f, **options) for f in (dot_product_attention, jax.nn.dot_product_attention))
        self.agree(ours, theirs, *arrays, atol=0.03)

    @pytest.mark.parametrize("batch", [1, 5])
    @pytest.mark.parametrize("vmapped", [False, True], ids=["batch", "vmap"])
    def test_a_bias_has_a_gradient(self, batch: int, vmapped: bool):
        x, bias = normal(0, batch, T, N, H), normal(1, batch, N, T, T)
        mask = jnp.ones((1, 1, T), bool)

        def attention(function: Callable[..., Any], x: jax.Array, bias: jax.Array) -> jax.Array:
            return function(query=x, key=x, value=x, bias=bias, mask=mask)

        ours, theirs = (functools.partial(attention, f) for f in (dot_product_attention, jax.nn.dot_product_attention))
        self.agree(jax.vmap(ours) if vmapped else ours, theirs, x, bias, atol=1e-4)

    REFUSED = {  # noqa: RUF012
        "cudnn": ({"implementation": "cudnn"}, BackendNotFoundError, "no ring-attention backend 'cudnn'"),
        "float64": ({"dtype": jnp.float64}, InputError, "query: has dtype float64"),
        "traced scale": ({"scale": jnp.float32(2.0)}, InputError, "scale: is traced"),
    }
    """cudnn runs on one device; no backend has float64; the scale is static, because kernels are compiled for it."""

    @pytest.mark.parametrize("case", REFUSED)
    def test_what_is_refused(self, case: str):
        options, error, message = self.REFUSED[case]
        given = dict(options)
        with jax.enable_x64(case == "float64"):
            q = jnp.zeros((B, T, N, H), given.pop("dtype", jnp.float32))
            arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
            with pytest.raises(error, match=message):
                jax.jit(lambda arrays: dot_product_attention(q, q, q, **given | arrays))(arrays)


def linen(attention_fn: Any = None, kind: Any = nn.MultiHeadDotProductAttention, **options: Any) -> Any:
    given = {} if attention_fn is None else {"attention_fn": attention_fn}
    ones = {"kernel_init": nn.initializers.lecun_normal(), "bias_init": nn.initializers.uniform()}
    return kind(num_heads=8, qkv_features=16, **ones, **given, **options)


class TestOfLinen:
    """A layer with our function equals the same layer with Flax's, given the same parameters."""

    @pytest.mark.parametrize("shape", [(4, 2, 3, 5), (6, 5)], ids=str)
    @pytest.mark.parametrize("kind", [nn.MultiHeadDotProductAttention, nn.MultiHeadAttention])
    def test_self_attention_of_any_batch(self, kind: Any, shape: tuple[int, ...]):
        x = normal(0, *shape)
        want, parameters = linen(kind=kind).init_with_output(jax.random.key(1), x)
        close(linen(ring_attention_fn(), kind).apply(parameters, x), want, 2e-5)

    def test_keys_and_values_of_another_length(self):
        query, keys = normal(0, 3, 5), normal(1, 9, 5)
        want, parameters = linen().init_with_output(jax.random.key(1), query, keys)
        for given in ((keys,), (keys, keys)):
            close(linen(ring_attention_fn()).apply(parameters, query, *given), want, 2e-5)

    def test_decoding_token_by_token_gives_the_causal_result(self):
        x = normal(0, 2, 3, 5, 12)
        decoder = linen(ring_attention_fn(), decode=True)
        variables = decoder.init(jax.random.key(1), x)
        want = linen().apply({"params": variables["params"]}, x, mask=nn.make_causal_mask(x[..., 0]))
        step = jax.jit(lambda variables, token: decoder.apply(variables, token, mutable=["cache"]))
        outs = []
        for at in range(x.shape[-2]):
            out, cache = step(variables, x[..., at : at + 1, :])
            variables = {**variables, **cache}
            outs.append(out)
        close(jnp.concatenate(outs, -2), want, 2e-5)

    @pytest.mark.parametrize("mask", ["of Flax", "of the ring"])
    def test_the_receptive_field_is_causal(self, mask: str):
        length = 10
        x = normal(2, 1, length, 16)
        lower = nn.make_causal_mask(x[..., 0])
        module = linen(ring_attention_fn(causal=mask == "of the ring"))
        parameters = module.init(jax.random.key(1), x)
        given = {"mask": lower} if mask == "of Flax" else {}
        fields = jax.jit(jax.jacrev(lambda x: module.apply(parameters, x, **given)[0].sum(-1)))(x)[:, 0]
        np.testing.assert_array_equal(np.abs(fields).max(-1) > 1e-6, lower[0, 0])

    def test_dropout_follows_its_key(self):
        x = normal(0, 4, 2, 3, 5)
        module = linen(ring_attention_fn(), dropout_rate=0.5, broadcast_dropout=False, deterministic=False)
        keys = jax.random.split(jax.random.key(0), 4)
        parameters = module.init({"params": keys[0], "dropout": keys[1]}, x)
        a, again, other = (module.apply(parameters, x, rngs={"dropout": key}) for key in (keys[2], keys[2], keys[3]))
        explicit = [module.apply(parameters, x, dropout_rng=keys[3]) for _ in range(2)]
        assert (a == again).all() and (explicit[0] == explicit[1]).all() and not (a == other).all()

    def test_dropout_that_is_switched_off_reads_no_key(self):
        x = normal(0, 4, 2, 3, 5)
        for options in ({"dropout_rate": 0.0}, {"dropout_rate": 0.5}):
            module = linen(ring_attention_fn(), deterministic=True, **options)
            parameters = module.init(jax.random.key(0), x)
            outs = [module.apply(parameters, x, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 2)]
            np.testing.assert_array_equal(*outs)

    REFUSED = {  # noqa: RUF012
        "complex numbers": ({}, {}, jnp.complex64, "query: has dtype complex64"),
        "sown weights": ({}, {"sow_weights": True}, jnp.float32, r"module \(sow_weights=True\): is set, and"),
        "one dropout for all heads": ({"dropout_rate": 0.1, "deterministic": False}, {}, jnp.float32, "broadcast_dro"),
        "64 bits": ({}, {}, jnp.float64, "query: has dtype float64"),
    }
    """No backend has complex64 or float64; a ring never holds all weights; our dropout differs between heads."""

    @pytest.mark.parametrize("case", REFUSED)
    def test_what_is_refused(self, case: str):
        layer, call, dtype, message = self.REFUSED[case]
        with jax.enable_x64(case == "64 bits"):
            keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
            with pytest.raises(InputError, match=message):
                linen(ring_attention_fn(), **layer).init(keys, jnp.ones((4, 6, 5), dtype), **call)


class TestOfNnx:
    LAYER = {"num_heads": 2, "in_features": 3, "qkv_features": 6, "out_features": 6}  # noqa: RUF012

    @pytest.mark.parametrize("decode", [False, True], ids=["whole", "decode"])
    @pytest.mark.parametrize("normalize_qk", [False, True], ids=["plain", "normalised"])
    @pytest.mark.parametrize(
        ("dtype", "param_dtype", "precision"),
        [
            (jnp.float32, jnp.float32, jax.lax.Precision.HIGHEST),
            (jnp.float32, jnp.float16, jax.lax.Precision.HIGH),
            (jnp.float16, jnp.float32, jax.lax.Precision.DEFAULT),
        ],
        ids=["float32", "half parameters", "half computation"],
    )
    def test_it_is_the_layer_of_linen(
        self, dtype: Any, param_dtype: Any, precision: Any, normalize_qk: bool, decode: bool
    ):
        x = jnp.ones((1, 3))
        options = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision, "normalize_qk": normalize_qk}
        options |= {"decode": decode}
        model = nnx.MultiHeadAttention(
            **self.LAYER, **options, attention_fn=ring_attention_fn(), rngs=nnx.Rngs(0), keep_rngs=False
        )
        linen_layer = {name: size for name, size in self.LAYER.items() if name != "in_features"}
        module = nn.MultiHeadDotProductAttention(**linen_layer, **options)
        variables = module.init(jax.random.key(42), x)
        for name in ("query", "key", "value", "out"):
            for part in ("kernel", "bias"):
                getattr(getattr(model, name), part)[...] = variables["params"][name][part]
        if decode:
            model.init_cache(x.shape, dtype=dtype)
        want, _ = module.apply(variables, x, mutable=["cache"])
        close(model(x), want, 2e-3 if dtype == jnp.float16 else 2e-5)

    @pytest.mark.parametrize("keys", [5, 8])
    def test_query_heads_share_key_heads(self, keys: int):
        query = normal(0, 2, 8, 4, 16)
        key, value = (normal(seed, 2, keys, 2, 16) for seed in (1, 2))
        close(ring_attention_fn()(query, key, value), nnx.dot_product_attention(query, key, value), 2e-5)

    def test_heads_that_do_not_divide_are_refused(self):
        with pytest.raises(InputError, match="key: has 2 heads, which do not divide the 5 of query"):
            ring_attention_fn()(jnp.ones((1, 4, 5, 8)), *[jnp.ones((1, 4, 2, 8))] * 2)

    def test_sown_weights_are_refused(self):
        layer = nnx.MultiHeadAttention(**self.LAYER, decode=False, attention_fn=ring_attention_fn(), rngs=nnx.Rngs(0))
        with pytest.raises(InputError, match=r"module \(sow_weights=True\): is set, and"):
            layer(jnp.ones((4, 6, 3)), sow_weights=True)
