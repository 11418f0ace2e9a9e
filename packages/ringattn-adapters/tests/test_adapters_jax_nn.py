# SPDX-License-Identifier: Apache-2.0
"""Promises of the drop-in for `jax.nn.dot_product_attention`: its names and defaults, its results and its gradients."""

import inspect
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from ringattn_adapters.jax_nn import dot_product_attention
from ringattn_core import MaskInfo, errors, from_layout, to_layout
from ringattn_testing.agreement import agree, mesh, normal

B, T, S, N, K, H = 2, 16, 16, 4, 2, 8
LENGTHS = jnp.array([16, 11], jnp.int32)


def operands(dtype: Any = jnp.float32, keys: int = S) -> tuple[jax.Array, ...]:
    return (
        normal(0, B, T, N, H, dtype=dtype),
        normal(1, B, keys, K, H, dtype=dtype),
        normal(2, B, keys, K, H, dtype=dtype),
    )


def both(function: Any, arrays: tuple[jax.Array, ...], **options: Any) -> tuple[Any, Any]:
    """Value and gradients of `function(output)`, with our attention and with JAX's."""

    def of(attend: Any) -> Any:
        return jax.value_and_grad(lambda arrays: function(attend(*arrays, **options)))

    with jax.numpy_dtype_promotion("standard"):
        # JAX's is not jitted as a whole: for float16 on a CPU it would then choose another matrix product.
        return jax.jit(of(dot_product_attention))(arrays), of(jax.nn.dot_product_attention)(arrays)


def loss(out: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


def test_the_names_order_and_defaults_are_those_of_jax():
    ours = list(inspect.signature(dot_product_attention).parameters.values())
    theirs = list(inspect.signature(jax.nn.dot_product_attention).parameters.values())
    for mine, its in zip(ours, theirs, strict=False):
        assert (mine.name, mine.kind, mine.default) == (its.name, its.kind, its.default)
    assert [p.name for p in ours[len(theirs) :]] == ["ring"]


MASK = jax.random.bernoulli(jax.random.key(5), 0.6, (B, N, T, S)).at[..., 0].set(True)
CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "sides": {"local_window_size": (5, 2)},
    "mask": {"mask": MASK},
    "mask-of-keys": {"mask": MASK[:, :1, :1]},
    "mask-everywhere": {"mask": jnp.ones((1, 1, 1, 1), bool)},
    "key-lengths": {"key_value_seq_lengths": LENGTHS},
    "both-lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS[::-1], "is_causal": True},
    "lengths-and-mask": {"query_seq_lengths": LENGTHS, "mask": MASK},
    "lengths-and-mask-of-keys": {"key_value_seq_lengths": LENGTHS, "mask": MASK[:, :1, :1]},
}


@pytest.mark.parametrize("name", ["sides", "mask-of-keys", "mask-everywhere", "key-lengths", "lengths-and-mask"])
def test_value_and_gradients_are_those_of_jax(name: str):
    """The other cases are compared over a mesh below."""
    agree(*both(loss, operands(), **CASES[name]))


@pytest.mark.parametrize("shape", [(1, N, T, S), (B, 1, 1, S), (1, 1, T, 1), (N, T, S)], ids=str)
def test_a_bias_and_its_gradient_are_those_of_jax(shape: tuple[int, ...]):
    agree(*both(loss, (*operands(), normal(3, *shape)), is_causal=True))


def test_arrays_without_a_batch_axis_give_an_output_without_one():
    agree(*both(loss, tuple(x[0] for x in operands()), is_causal=True))


@pytest.mark.parametrize(("dtype", "axes"), [(jnp.float32, 3), (jnp.bfloat16, 4)], ids=["float32", "bfloat16"])
def test_the_residual_has_the_shape_the_dtype_and_the_missing_gradient_of_jax(dtype: Any, axes: int):
    arrays = tuple(x if axes == 4 else x[0] for x in operands(dtype))

    def of_both(result: tuple[jax.Array, jax.Array]) -> jax.Array:
        return loss(result[0]) + loss(result[1])

    atol = 1e-4 if dtype == jnp.float32 else 0.5
    agree(*both(of_both, arrays, is_causal=True, return_residual=True), atol)
    got = dot_product_attention(*arrays, return_residual=True)[1]
    assert got.shape == arrays[0].shape[:-1] and got.dtype == dtype


@pytest.mark.parametrize(
    "options",
    [{"mask": MASK.at[:, :, 0].set(False)}, {"bias": jnp.zeros((1, 1, T, S)).at[:, :, 0].set(-1e9)}],
    ids=["mask", "bias of -1e9"],
)
def test_a_query_that_sees_no_key_gets_zero_where_jax_gives_it_the_mean(options: dict[str, Any]):
    arrays = operands()
    out, theirs = (f(*arrays, **options) for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert (out[:, 0] == 0).all()
    np.testing.assert_allclose(out[:, 1:], theirs[:, 1:], atol=1e-5)
    np.testing.assert_allclose(theirs[:, 0], jnp.repeat(arrays[2].mean(1), N // K, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("causal", "zigzag"),
        ("mask", "striped"),
        ("both-lengths", "striped"),
        ("lengths-and-mask-of-keys", "zigzag"),
    ],
)
def test_a_mesh_gives_what_one_device_gives_in_every_layout(name: str, layout: str):
    options, there = dict(CASES[name]), mesh()
    laid = tuple(to_layout(x, layout, 4) for x in operands())
    if name == "mask":  # its rows are in layout order, like the queries
        options["mask"] = to_layout(options["mask"], layout, 4, axis=2)

    def ours(arrays: Any) -> jax.Array:
        return loss(dot_product_attention(*arrays, **options, mesh=there, axis_name="sp", layout=layout))

    got = jax.jit(jax.value_and_grad(ours))(laid)
    want = jax.value_and_grad(lambda x: loss(jax.nn.dot_product_attention(*x, **CASES[name])))(operands())
    agree((got[0], [from_layout(x, layout, 4) for x in got[1]]), (want[0], list(want[1])))


@pytest.mark.parametrize(("jit", "kind"), [(True, AxisType.Auto), (False, AxisType.Explicit)])
def test_the_mesh_of_set_mesh_is_the_mesh_of_the_call(jit: bool, kind: AxisType):
    options = dict(CASES["lengths-and-mask-of-keys"])
    laid = tuple(to_layout(x, "zigzag", 4) for x in operands())
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "sp"), axis_types=(kind,) * 2)):

        def ours(*arrays: jax.Array) -> jax.Array:
            return dot_product_attention(*arrays, **options, axis_name="sp", layout="zigzag")

        got = (jax.jit(ours) if jit else ours)(*laid)
    want = dot_product_attention(*operands(), **options)
    np.testing.assert_allclose(from_layout(got, "zigzag", 4), want, atol=2e-5)


def test_inside_a_shard_map_lengths_and_masks_of_keys_are_those_of_the_whole_sequence():
    layout, split, there = "zigzag", P("data", "sp"), mesh()
    row = MASK[:, :1, :1]

    def local(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, row: jax.Array) -> jax.Array:
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "mask": row, "is_causal": True}
        named = {"axis_name": "sp", "batch_axis_name": "data"}
        return dot_product_attention(query, key, value, **options, **named, layout=layout)

    spread = jax.shard_map(local, mesh=there, in_specs=(split, split, split, P("data"), P("data")), out_specs=split)
    out = jax.jit(spread)(*(to_layout(x, layout, 4) for x in operands()), LENGTHS, row)
    one = dot_product_attention(
        *operands(), query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS, mask=row, is_causal=True
    )
    np.testing.assert_allclose(from_layout(out, layout, 4), one, atol=2e-5)


def test_a_mask_of_keys_makes_no_array_of_the_square_of_the_length():
    arrays = tuple(normal(seed, 1, 4096, 1, 8) for seed in range(3))
    row = jnp.ones((1, 1, 1, 4096), bool)
    text = str(jax.make_jaxpr(lambda *x: dot_product_attention(*x, mask=row))(*arrays))
    assert "4096,4096" not in text
    assert "4096,4096" in str(jax.make_jaxpr(lambda *x: jax.nn.dot_product_attention(*x, mask=row))(*arrays))


def test_a_warning_names_the_line_of_the_caller():
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("other", "sp"))
    with pytest.warns(UserWarning, match="nothing is split") as caught:
        dot_product_attention(*operands(), mesh=other, axis_name="sp")
    assert [warning.filename for warning in caught] == [__file__]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mask of five axes": ({"mask": jnp.ones((1, 1, 1, T, S), bool)}, r"mask: has shape \(1, 1, 1, 16, 16\)"),
    "a mask of another batch": ({"mask": jnp.ones((3, 1, 1, S), bool)}, r"^mask: has shape \(3, 1, 16, 16\)"),
    "lengths of another batch": ({"query_seq_lengths": jnp.ones(3, int)}, r"query_seq_lengths: has shape \(3,\)"),
    "ids beyond int32": (
        {"q_segment_ids": np.full((B, T), 2**40), "query_seq_lengths": LENGTHS}, "q_segment_ids: has values outside"
    ),
    "a misspelt name of JAX": ({"return_residuals": True}, r"return_residuals: is no option .*'return_residual'\?"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_named(name: str):
    given, message = REFUSED[name]
    with pytest.raises(errors.InputError, match=message):
        dot_product_attention(*operands(), **given)


def test_an_implementation_of_jax_is_no_backend():
    with pytest.raises(errors.BackendNotFoundError, match="no ring-attention backend 'cudnn'"):
        dot_product_attention(*operands(), implementation="cudnn")


def test_the_adapters_of_functions_import_no_other_library():
    code = "import sys, ringattn_adapters.jax_nn, ringattn_adapters.flax as f; f.ring_attention_fn(); "
    code += "sys.exit(bool({'flax', 'equinox', 'optax'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_prefix_for_each_row_is_a_range():
    info, arrays = MaskInfo.from_prefixes(LENGTHS, T), operands()
    index = np.arange(T)
    mask = jnp.asarray((index <= index[:, None]) | (index < np.asarray(LENGTHS)[:, None, None]))[:, None]
    got = dot_product_attention(*arrays, kv_range=info.kv_range, mesh=mesh(), axis_name="sp")
    np.testing.assert_allclose(got, jax.nn.dot_product_attention(*arrays, mask=mask), atol=2e-5)
