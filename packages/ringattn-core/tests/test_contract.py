# SPDX-License-Identifier: Apache-2.0
"""A kernel that breaks the block protocol gets an error that says what it returned and what it must return."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core import Backend, Feature, Gradients, Partial, masks, ring_attention
from ringattn_core.backends import discovery
from ringattn_core.errors import KernelError
from ringattn_testing.rings import close, mesh_of
from ringattn_xla.block import XlaKernel

EVERYTHING = Backend(name="odd", api=1, platforms=("cpu",), kernel="a:b", features=frozenset(Feature))


class Odd:
    """A kernel that returns zeros, with some results replaced."""

    def __init__(self, **replaced: Any):
        self.replaced = replaced

    def forward(self, block: Any, partial: Partial) -> Any:
        result = Partial(jnp.zeros(block.q.shape), jnp.zeros((1, 2, 4)))
        return self.replaced.get("forward", dataclasses.replace(result, **self.of(Partial)))

    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Any:
        result = Gradients(
            jnp.zeros(block.q.shape), jnp.zeros(block.k.shape), jnp.zeros(block.v.shape), jnp.zeros(block.bias.shape)
        )
        return dataclasses.replace(result, **self.of(Gradients))

    def of(self, kind: type) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in self.replaced.items() if name in names}


def differentiate(kernel: Odd) -> Any:
    q = jnp.ones((1, 4, 2, 8))
    with discovery.registered(EVERYTHING, kernel):
        return jax.grad(lambda bias: ring_attention(q, q, q, None, bias, backend="odd").sum())(jnp.ones((1, 2, 4, 4)))


@pytest.mark.parametrize(
    "replaced, message",
    [
        (dict(forward=(1, 2)), "Odd.forward returned tuple. Return a Partial"),
        (dict(lse=jnp.ones((1, 4, 2))), "Odd.forward returned lse = float32[1, 4, 2]. Return float32[1, 2, 4]"),
        (dict(dbias=None), "Odd.backward returned dbias = None. Return float32[1, 2, 4, 4]"),
    ],
)
def test_a_result_of_another_shape_is_refused(replaced: dict[str, Any], message: str):
    with pytest.raises(KernelError) as error:
        differentiate(Odd(**replaced))
    assert message in str(error.value)


class Final(XlaKernel):
    """A kernel that returns the dtypes of the inputs where the block is final, and records what it was given."""

    def __init__(self) -> None:
        self.forward_blocks: list[Any] = []
        self.backward_blocks: list[Any] = []
        self.given: list[Any] = []

    def forward(self, block: Any, partial: Partial | None) -> Partial:
        self.forward_blocks.append(block)
        self.given.append(partial)
        done = super().forward(block, partial)
        return dataclasses.replace(done, out=done.out.astype(block.q.dtype)) if block.final else done

    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Gradients:
        self.backward_blocks.append(block)
        self.given.append(dq)
        found = super().backward(block, dout, lse, delta, dq)
        if not block.final:
            return found
        like = {"dq": block.q, "dk": block.k, "dv": block.v, "dbias": block.bias}
        return dataclasses.replace(found, **{name: getattr(found, name).astype(x.dtype) for name, x in like.items()})


@pytest.mark.parametrize("options", [{}, {"sinks": jnp.zeros(2)}, {"ring": 2}], ids=["alone", "sinks", "ring of 2"])
def test_a_block_is_final_where_nothing_comes_before_or_after(options: dict[str, Any]):
    kernel, options = Final(), dict(options)
    ring, sinks = options.pop("ring", 1), options.pop("sinks", None)
    mesh = mesh_of(sp=ring)
    q, bias = jnp.linspace(-1, 1, 64).reshape(1, 8, 2, 4).astype(jnp.bfloat16), jnp.ones((1, 2, 8, 8), jnp.bfloat16)
    slopes = jnp.ones(2)

    def call(q: Any, bias: Any, slopes: Any, backend: str) -> jax.Array:
        given = dict(alibi_slopes=slopes, causal=True, mesh=mesh, axis_name="sp", backend=backend)
        return ring_attention(q, 2 * q, 3 * q, sinks, bias, **given)

    def both(backend: str) -> list[jax.Array]:
        out, pullback = jax.vjp(lambda *x: call(*x, backend), q, bias, slopes)
        return [call(q, bias, slopes, backend), out, *pullback(q)]

    with discovery.registered(EVERYTHING, kernel):
        got = both("odd")
    for x, y in zip(got, both("xla"), strict=True):
        assert x.dtype == y.dtype and (x == y).all()
    assert {block.final for block in kernel.forward_blocks} == {ring == 1}
    assert {block.final for block in kernel.backward_blocks} == {ring == 1}
    blocks = [*kernel.forward_blocks, *kernel.backward_blocks]
    assert all(isinstance(block.kv, tuple) == (ring == 1) for block in blocks)
    continued = [x for x in kernel.given if x is not None and getattr(x, "out", x) is not None]
    assert (ring > 1) == bool(continued)


def test_the_backward_pass_keeps_the_output_in_the_dtype_of_the_caller():
    q = jnp.linspace(-1, 1, 2 * 16 * 3 * 8).reshape(2, 16, 3, 8).astype(jnp.bfloat16)
    value = jnp.linspace(1, 2, 2 * 16 * 5).reshape(2, 16, 1, 5).astype(jnp.bfloat16)
    out, pullback = jax.vjp(lambda q, v: ring_attention(q, q[:, :, :1], v, causal=True), q, value)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == out.shape]
    assert [leaf.dtype.name for leaf in kept] == ["bfloat16"] and (kept[0] == out).all()


def test_a_16_bit_result_is_refused_where_the_block_is_not_final():
    class Narrow(Final):
        def forward(self, block: Any, partial: Partial | None) -> Partial:
            return super().forward(dataclasses.replace(block, final=True), partial)

    q = jnp.ones((1, 16, 2, 4), jnp.bfloat16)
    error = pytest.raises(KernelError, match=r"returned out = bfloat16\[1, 8, 2, 4\]. Return float32\[1, 8, 2, 4\]")
    with discovery.registered(EVERYTHING, Narrow()), error:
        ring_attention(q, q, q, mesh=mesh_of(sp=2), axis_name="sp", backend="odd")


def test_a_gradient_of_an_absent_input_is_dropped():
    assert (differentiate(Odd(dslopes=jnp.ones((1, 2)))) == 0).all()


class Remembering(XlaKernel):
    """A kernel that records `bias_fixed`, and returns no `dbias` where it is set."""

    def __init__(self) -> None:
        self.fixed: list[bool] = []

    __hash__, __eq__ = object.__hash__, object.__eq__

    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Gradients:
        self.fixed.append(block.bias_fixed)
        found = super().backward(block, dout, lse, delta, dq)
        assert block.bias is None or (found.dbias is None) == block.bias_fixed
        return found


@pytest.mark.parametrize(
    ("ring", "transform"), [(1, lambda f: f), (2, jax.checkpoint)], ids=["plain", "ring with remat"]
)
def test_the_gradient_of_a_bias_is_computed_only_where_it_is_differentiated(ring: int, transform: Any):
    kernel = Remembering()
    mesh = mesh_of(sp=ring)
    draw = np.random.default_rng(0)
    q, bias = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((2, 8, 2, 4), (1, 2, 8, 8)))

    def loss(q: jax.Array, bias: jax.Array, backend: str) -> jax.Array:
        given = dict(causal=True, mesh=mesh, axis_name="sp", backend=backend)
        return (ring_attention(q, 2 * q, 3 * q, None, bias, **given) ** 2).sum()

    wanted = jax.jit(jax.grad(lambda *arrays: loss(*arrays, "xla"), (0, 1)))(q, bias)
    for by in ((0,), (1,), (0, 1)):
        kernel.fixed.clear()
        with discovery.registered(EVERYTHING, kernel):
            got = jax.jit(jax.grad(transform(lambda *arrays: loss(*arrays, "odd")), by))(q, bias)
        assert set(kernel.fixed) == {1 not in by}
        close(got, tuple(wanted[number] for number in by), 1e-6, 1e-5)


@pytest.mark.parametrize(
    ("ring", "transform", "fixed_first"),
    [(1, lambda f: f, False), (2, jax.jit, False), (2, jax.checkpoint, True)],
    ids=["plain", "jit", "remat"],
)
def test_one_trace_may_differentiate_the_bias_of_one_call_and_not_of_another(
    ring: int, transform: Any, fixed_first: bool
):
    """JAX traces the call once, and differentiates that trace with respect to the bias and without it."""
    draw = np.random.default_rng(1)
    q, bias = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((1, 8, 2, 4), (1, 2, 8, 8)))

    def loss(q: jax.Array, bias: jax.Array, constant: jax.Array, axis: str) -> jax.Array:
        def attend(q: jax.Array, bias: jax.Array) -> jax.Array:
            return ring_attention(q, 2 * q, 3 * q, None, bias, mesh=mesh_of(**{axis: ring}), axis_name=axis)

        order = (constant, bias) if fixed_first else (bias, constant)
        return (attend(attend(q, order[0]), order[1]) ** 2).sum()

    # JAX keeps what it traced for a mesh; each gradient and each case has another, which it has not seen.
    every, some = (functools.partial(loss, axis=f"{name}_{ring}_{fixed_first}") for name in ("every", "some"))
    want = jax.jit(jax.grad(every, (0, 1, 2)))(q, bias, 0 * bias)
    got = jax.jit(jax.grad(transform(some), (0, 1)))(q, bias, 0 * bias)
    assert float(jnp.abs(want[1]).max()) > 1
    close(got, want[:2], 1e-4, 1e-5)


class Constant:
    """A kernel that returns arrays of NumPy, which vary over no mesh axis, and records over which its inputs do."""

    static_masks = False

    def __init__(self) -> None:
        self.axes: list[set[frozenset[str]]] = []

    def forward(self, block: Any, partial: Partial | None) -> Partial:
        self.record(block, partial)
        batch, length, heads, _ = block.q.shape
        return Partial(np.zeros((*block.q.shape[:3], block.value_dim), "f"), np.zeros((batch, heads, length), "f"))

    def backward(self, block: Any, *arrays: Any) -> Gradients:
        self.record(block, arrays)
        inputs = (block.q, block.k, block.v, block.bias, block.slopes)
        return Gradients(*(None if x is None else np.zeros(x.shape, "f") for x in inputs))

    def record(self, *arrays: Any) -> None:
        self.axes.append({jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)})


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("static_masks", [False, True])
def test_a_kernel_need_not_know_of_mesh_axes(ring: int, static_masks: bool):
    mesh = mesh_of(ring=ring)
    x, bias, sinks = jnp.ones((1, 8, 2, 8)), jnp.ones((1, 2, 1, 8)), jnp.ones(2)
    options: Any = {"causal": True}
    if not static_masks:
        options = {"q_segment_ids": jnp.zeros((1, 8 // ring), int), "alibi_slopes": jnp.ones(2), "dropout_prob": 0.5}
        options |= {"dropout_seed": 3, "mask_builder": lambda *_: masks.Causal()}

    def gradients(x: Any, bias: Any, sinks: Any) -> Any:
        def loss(x: Any, bias: Any, sinks: Any) -> Any:
            ids = options.get("q_segment_ids")
            more = {} if ids is None else {"q_segment_ids": ids + jax.lax.axis_index("ring")}
            return ring_attention(x, x, x, sinks, bias, axis_name="ring", backend="odd", **options | more).sum()

        return jax.grad(loss, (0, 1, 2))(x, bias, sinks)

    specs = P(None, "ring"), P(), P()
    checked = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=True)
    kernel = Constant()
    kernel.static_masks = static_masks
    with discovery.registered(EVERYTHING, kernel):
        dx, dbias, _ = jax.jit(checked)(x, bias, sinks)
    assert dx.shape == x.shape and dbias.shape == bias.shape and not dx.any() and not dbias.any()
    assert kernel.axes and all(axes == {frozenset({"ring"})} for axes in kernel.axes), kernel.axes
