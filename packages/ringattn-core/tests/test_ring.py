# SPDX-License-Identifier: Apache-2.0
"""Promises of the engine: a scan and an unrolled ring agree bit for bit, and memory does not grow with the ring."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import Gradients, ring_attention
from ringattn_core.backends.discovery import registered
from ringattn_core.contract import ordering, packing
from ringattn_core.errors import DerivativeError
from ringattn_core.ring import hops, parcels
from separate_sends import SEPARATE, SeparateSends

N, K, H = 4, 2, 8


def arrays(length: int, dtype: Any = jnp.float32, dims: tuple[int, int] = (H, H)) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((N, dims[0]), (K, dims[0]), (K, dims[1]))
    return [jax.random.normal(key, (1, length, *shape), dtype) for key, shape in zip(keys, shapes, strict=True)]


def mesh_of(ranks: int, axis: str = "sp") -> jax.sharding.Mesh:
    return jax.make_mesh((ranks,), (axis,), axis_types=(AxisType.Auto,))


def differentiated(ranks: int, axis: str = "sp", **options: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        out = ring_attention(q, k, v, mesh=mesh_of(ranks, axis), axis_name=axis, **options)
        return (out.astype(jnp.float32) ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (jnp.float32, dict(causal=True)),
        (jnp.bfloat16, dict(sliding_window=3)),
        (jnp.bfloat16, dict(causal=True, layout="zigzag")),
        (jnp.bfloat16, dict(layout="striped", two_way=True, dropout_prob=0.2, dropout_seed=5)),
    ],
    ids=str,
)
def test_a_ring_in_a_scan_equals_an_unrolled_ring_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, options: dict[str, Any]
):
    operands = arrays(24, dtype)
    unrolled = differentiated(6, **options)(*operands)
    monkeypatch.setattr(hops, "UNROLLED", 2)
    # JAX keeps what it traced for a mesh; the other ring is on another.
    looped = differentiated(6, "looped", **options).trace(*operands)
    assert ("scan" in str(looped.jaxpr)) == ("sliding_window" not in options)
    for a, b in zip(jax.tree.leaves(unrolled), jax.tree.leaves(looped.lower().compile()(*operands)), strict=True):
        assert (a == b).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dims", [(4, 4), (4, 6), (4, 5)])
def test_a_parcel_gives_back_what_was_joined_bit_for_bit(dtype: Any, dims: tuple[int, int]):
    k, v = (jax.random.normal(jax.random.key(n), (2, 3, 1, d), dtype) for n, d in enumerate(dims))
    kv = packing.pack(k, v)
    gradients = jax.random.normal(jax.random.key(9), kv.shape) * jnp.float32(1e-30)
    wire, sums = parcels.split(parcels.join(parcels.to_wire(kv), gradients))
    got = parcels.from_wire(wire, dtype)
    assert (got == kv).all() and (sums == gradients).all()
    assert all((a == b).all() for a, b in zip(packing.unpack(got, dims[0]), (k, v), strict=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_parcel_stays_split_over_the_other_axes_of_a_mesh(dtype: Any):
    """A parcel of one row would be gathered over "tp" first, and every rank of "tp" would send all heads."""
    mesh = jax.make_mesh((4, 2), ("sp", "tp"), axis_types=(AxisType.Auto,) * 2)
    spec = P(None, "sp")

    def local(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q, k, v, causal=True, axis_name="sp")

    ring = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, axis_names={"sp"}, check_vma=False)
    split = jax.NamedSharding(mesh, P(None, "sp", "tp"))
    operands = [jax.ShapeDtypeStruct((2, 64, 4, 8), dtype, sharding=split)] * 3
    gradients = jax.jit(jax.grad(lambda *x: ring(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    assert "all-gather" not in gradients.lower(*operands).compile().as_text()


@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 8), ("float16", 7), ("float32", 8)])
def test_every_platform_packs_keys_and_values_in_the_same_way(dtype: str, dim: int):
    """CUDA packs by `_in_pairs`, which no other test here would run."""
    k, v = (jax.random.normal(jax.random.key(n), (2, 3, 2, dim)).astype(dtype) for n in range(2))
    in_pairs, packed = jax.jit(packing._in_pairs)(k, v), packing.pack_to_send(k, v)
    assert in_pairs.dtype == packed.dtype and (in_pairs == packed).all()
    assert all((x == y).all() for x, y in zip(packing.unpack(in_pairs, dim), (k, v), strict=True))


def test_gradients_that_a_kernel_has_written_as_one_array_are_not_copied():
    @jax.jit
    def program(x: Any) -> Any:
        both = jax.lax.optimization_barrier(jnp.sin(x))
        return packing.pack(both[0], both[1])

    x = jnp.arange(48.0).reshape(2, 1, 3, 2, 4)
    assert (program(x) == jnp.sin(x)).all()
    text = program.lower(x).compile().as_text()
    assert "sine(" in text and "concatenate(" not in text and "slice(" not in text


def compiled(ranks: int, length: int, gradient: bool) -> Any:
    shape = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q, k, v, causal=True, mesh=mesh_of(ranks), axis_name="sp")

    f = jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2)) if gradient else attend
    spec = jax.NamedSharding(mesh_of(ranks), P(None, "sp"))
    return jax.jit(f, in_shardings=spec).lower(shape, shape, shape).compile()


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_per_device_depends_on_the_shard_and_not_on_the_ring(gradient: bool):
    packed = 2 * 1024 * 2 * 64 * 4
    small, large = (compiled(n, n * 1024, gradient).memory_analysis().temp_size_in_bytes for n in (5, 8))
    one = compiled(1, 1024, gradient).memory_analysis().temp_size_in_bytes
    assert large <= small + packed // 4
    # Beyond one device, a ring holds its own K,V packed, the K,V that arrive, and at most 0.6 of that size more.
    assert large <= one + 2.6 * packed * (2 if gradient else 1)


def kernels_before(jaxpr: Any) -> tuple[list[set[int]], list[set[int]]]:
    """Which kernels must end first, by their numbers in the order of the program.

    Returns two lists of sets of numbers. A set of the first list belongs to a permute: these kernels end before the
    permute begins. A set of the second list belongs to a kernel: these kernels end before it can read its keys.
    """
    waits: dict[Any, set[int]] = {}
    sends, keys = [], []
    for equation in jaxpr.eqns:
        inputs = [x for x in equation.invars if not isinstance(x, Literal)]
        needed = set().union(*(waits.get(x, set()) for x in inputs))
        if equation.primitive.name == "ppermute":
            sends.append(needed)
        if equation.primitive.name == "custom_vmap_call":
            needed |= {len(keys)}
            keys.append(set().union(*(waits.get(x, set()) for x in inputs if x.aval.ndim == 5)))
        waits |= dict.fromkeys(equation.outvars, needed)
    return sends, keys


@pytest.mark.parametrize("two_way", [False, True])
def test_a_send_waits_for_all_kernels_of_the_hop_before_and_for_none_of_its_own(two_way: bool):
    """So any scheduler may hide the sends of a hop behind its kernels, in both passes."""
    program = jax.make_jaxpr(differentiated(4, two_way=two_way, causal=True))(*arrays(16))
    bodies = {id(body): body for e in equations(program.jaxpr) for body in jaxprs_in_params(e.params)}
    forward, backward = (found for body in bodies.values() if any((found := kernels_before(body))[0]))
    ways = 2 if two_way else 1
    before = [set(range(ways * hop)) for hop in range(4) for _ in range(ways)]
    assert forward[0] == before[: 3 * ways]
    assert backward[0] == [*before[:ways], *before]
    # The keys that a kernel reads wait for the kernels of the hop before too, so that no kernel runs before its turn.
    assert forward[1] == backward[1] == before


class Recording(SeparateSends):
    """A kernel that makes no array of zeros in its backward pass, and records whether it is given `dq`."""

    def __init__(self, separate: bool):
        self.separate_sends = separate
        self.given: list[bool] = []

    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Gradients:
        self.given.append(dq is not None)
        return Gradients(block.q if dq is None else block.q + dq, block.k, block.v)


@pytest.mark.parametrize(
    ("ranks", "separate", "two_way"),
    [(2, False, False), (4, False, False), (4, False, True), (2, True, False), (4, True, False)],
)
def test_the_first_kernel_of_each_direction_gets_no_dq_and_no_program_writes_zeros_for_it(
    ranks: int, separate: bool, two_way: bool
):
    """If sends are separate, the first kernel has half of the heads; the other half of dq does begin with zeros."""
    operands, kernel, ways = arrays(4 * ranks, dims=(H, 6)), Recording(separate), 2 if two_way else 1
    with registered(dataclasses.replace(SEPARATE, name="recording"), kernel):
        program = jax.make_jaxpr(differentiated(ranks, backend="recording", two_way=two_way))(*operands)
    # JAX may trace the kernels of several hops once.
    assert kernel.given == sorted(kernel.given) and {*kernel.given} == {False, True}
    zeros = [x.outvars[0].aval.shape for x in equations(program.jaxpr) if x.primitive.name == "broadcast_in_dim"]
    assert (1, 4, N // ways, H) not in zeros and ((1, 4, N // ways // 2, H) in zeros) == separate


def test_two_way_changes_no_program_where_it_has_no_effect():
    def program(ranks: int, **options: Any) -> str:
        # Parameters that are functions print with their addresses, which differ.
        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(differentiated(ranks, **options))(*arrays(16))))

    for ranks, options in ((2, {}), (1, {}), (4, dict(sliding_window=3))):
        assert program(ranks, two_way=True, **options) == program(ranks, **options)
    assert program(4, two_way=True) != program(4)


@pytest.mark.parametrize(
    ("dtype", "emulated", "two_way", "bias_heads"),
    [
        (jnp.float32, True, False, 1),
        (jnp.float32, False, False, N),
        (jnp.float32, False, True, 1),
        (jnp.bfloat16, True, False, N),
        (jnp.bfloat16, False, False, 1),
    ],
)
def test_separate_sends_give_the_same_gradients(dtype: Any, emulated: bool, two_way: bool, bias_heads: int):
    heads = (N, N, N) if two_way else (N, K, K)
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (4, 1, 8, n, H), dtype) for key, n in zip(keys, heads, strict=False))
    bias = jax.random.normal(keys[3], (4, 1, bias_heads, 8, 32))
    slopes = jnp.broadcast_to(jax.random.uniform(keys[4], (N,)), (4, N))

    def gradients(backend: str) -> Any:
        options: dict[str, Any] = dict(causal=True, layout="zigzag", two_way=two_way, axis_name="sp", backend=backend)

        def attend(q: Any, k: Any, v: Any, bias: Any, slopes: Any) -> Any:
            return ring_attention(q, k, v, None, bias, alibi_slopes=slopes, **options)

        def loss(*x: Any) -> Any:
            if emulated:
                out = jax.vmap(attend, axis_name="sp")(*x)
            else:
                each = jax.shard_map(
                    lambda *x: attend(*(y[0] for y in x))[None], mesh=mesh_of(4), in_specs=P("sp"), out_specs=P("sp")
                )
                out = each(*x)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4)))(q, k, v, bias, slopes)

    with registered(SEPARATE, SeparateSends()):
        for a, b in zip(jax.tree.leaves(gradients("separate")), jax.tree.leaves(gradients("xla")), strict=True):
            difference = jnp.abs(a - b).max() / jnp.abs(b).max()
            assert float(difference) <= 4 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_the_tie_orders_two_computations_on_cpu(dtype: str):
    """XLA for CPU drops an optimisation barrier; the tie stays in the compiled program, and changes no bit."""
    x, token = jnp.arange(4).astype(dtype), jnp.full((2, 2), jnp.nan)

    def reads_the_token(tied: Any) -> bool:
        program = jax.jit(lambda x, token: tied(x, token) * 2).lower(x, token).compile().as_text() or ""
        entry = program[program.index("ENTRY") :]
        return len(re.findall(re.escape(re.findall(r"(%\S+) = \S+ parameter\(1\)", entry)[0]) + r"\b", entry)) > 1

    assert (jax.jit(ordering.tie)(x, token) == x).all()
    assert reads_the_token(ordering.tie)
    assert not reads_the_token(lambda x, token: jax.lax.optimization_barrier((x, token))[0])


@pytest.mark.parametrize("bits", [0x7FC00001, 0xFF800000, 0x80000000, 0x00000001])
def test_the_tie_keeps_every_bit_of_a_float(bits: int):
    x = jax.lax.bitcast_convert_type(jnp.full(3, bits, jnp.uint32), jnp.float32)
    tied = jax.jit(ordering.tie)(x, jnp.ones(2))
    assert (jax.lax.bitcast_convert_type(tied, jnp.uint32) == jnp.uint32(bits)).all()


@pytest.mark.parametrize("tie", [ordering.tie, ordering.tie_on_cpu])
def test_a_number_may_wait_for_an_array_that_varies_over_the_mesh(tie: Any):
    """On a mesh with `check_vma` the number then counts as varying too, on every platform."""
    waiting = jax.shard_map(
        lambda token: tie(jnp.int32(7), token)[None], mesh=mesh_of(4), in_specs=P("sp"), out_specs=P("sp")
    )
    assert (jax.jit(waiting)(jnp.ones(8)) == 7).all()


def test_float32_is_exact_whatever_precision_jax_is_set_to():
    """Otherwise JAX's default precision would decide how exact a matrix product is on a GPU."""
    q, k, v = arrays(16)

    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return ring_attention(q, k, v, sinks, causal=True, backend="xla").sum()

    with jax.default_matmul_precision("bfloat16"):
        program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, jnp.arange(4.0))
    found = [eqn.params["precision"] for eqn in equations(program.jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(found) >= 8
    assert {p for precision in found for p in precision} == {jax.lax.Precision.HIGHEST}


def test_zeros_after_a_token_are_zero_whatever_the_token():
    for token in (jnp.full(3, jnp.nan), jnp.full(3, -jnp.inf), jnp.full(3, 1.5, jnp.bfloat16), jnp.arange(1, 3)):
        assert (jax.jit(lambda t: ordering.zeros((2, 2), t))(token) == 0).all()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_gradients_of_replicated_inputs_mean_what_the_documentation_says(check_vma: bool, where: str):
    q, k, v = arrays(16)
    sinks, slopes = jnp.arange(4.0), jnp.linspace(0.1, 0.4, 4)
    bias = jax.random.normal(jax.random.key(5), (1, 1, 1, 16))
    weight = jax.random.normal(jax.random.key(6), q.shape)

    def local(w: Any, *x: Any, axis: Any = "sp") -> Any:
        return (ring_attention(*x[:5], alibi_slopes=x[5], axis_name=axis, causal=True) * w).sum()

    wanted = jax.grad(local, range(1, 7))(weight, q, k, v, sinks, bias, slopes, axis=None)
    tokens = P(None, "sp")
    specs = (tokens,) * 4 + (P(), P(), P())
    mesh = mesh_of(4)
    if where == "outside":
        total = jax.shard_map(
            lambda *x: jax.lax.psum(local(*x), "sp"), mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma
        )
        got = jax.jit(jax.grad(total, range(1, 7)))(weight, q, k, v, sinks, bias, slopes)
    else:

        def gradients(*x: Any) -> Any:
            mine = jax.grad(local, range(1, 7))(*x)
            return mine if check_vma else (*mine[:3], *(jax.lax.psum(g, "sp") for g in mine[3:]))

        got = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs[1:], check_vma=check_vma))(
            weight, q, k, v, sinks, bias, slopes
        )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


def _weighed(weight: Any, x: Any) -> Any:
    return (weight * ring_attention(x, x, x, causal=True)).sum()


TWICE: dict[str, Callable[[jax.Array], Any]] = {
    "reverse over reverse": jax.grad(lambda x: (jax.grad(_weighed, 1)(1.0, x) ** 2).sum()),
    "forward over reverse": jax.hessian(lambda x: _weighed(1.0, x)),
    "by the cotangent alone": lambda x: jax.grad(lambda w: (jax.grad(_weighed, 1)(w, x) ** 2).sum())(1.0),
    "compiled": jax.jit(jax.grad(lambda x: (jax.grad(_weighed, 1)(1.0, x) ** 2).sum())),
}


@pytest.mark.parametrize("how", TWICE)
def test_a_second_derivative_is_refused(how: str):
    with pytest.raises(DerivativeError, match=r"differentiated again, and there is no rule"):
        TWICE[how](arrays(8)[1])


def test_a_gradient_at_stopped_inputs_may_be_part_of_a_loss():
    x = arrays(8)[1]

    def loss(x: Any) -> Any:
        return _weighed(1.0, x) + jax.grad(_weighed, 1)(1.0, jax.lax.stop_gradient(x)).sum()

    np.testing.assert_array_equal(jax.grad(loss)(x), jax.grad(_weighed, 1)(1.0, x))
