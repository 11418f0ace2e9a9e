# SPDX-License-Identifier: Apache-2.0
"""Promises of the engine: a scan and an unrolled ring agree bit for bit, and memory does not grow with the ring."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core import ring_attention
from ringattn_core.contract import ordering
from ringattn_core.errors import DerivativeError
from ringattn_core.ring import plan
from ringattn_core.ring.kv import KV, packed, total
from ringattn_testing.rings import close, differentiated, mesh_of, query_key_value
from ringattn_testing.traced_calls import bodies, order_of


def arrays(length: int) -> list[jax.Array]:
    return query_key_value(1, length, 4, 2)


def over(ranks: int, axis: str = "sp", **options: Any) -> Any:
    return differentiated(functools.partial(ring_attention, mesh=mesh_of(**{axis: ranks}), axis_name=axis, **options))


def test_a_ring_in_a_scan_equals_an_unrolled_ring_bit_for_bit(monkeypatch: pytest.MonkeyPatch):
    operands, options = arrays(24), dict(causal=True, layout="zigzag", dropout_prob=0.2, dropout_seed=5)
    unrolled = jax.jit(over(4, **options))(*operands)
    monkeypatch.setattr(plan, "UNROLLED", 2)
    # JAX keeps what it traced for a mesh; the other ring is on another.
    looped = jax.jit(over(4, "looped", **options)).trace(*operands)
    assert "scan" in str(looped.jaxpr)
    for a, b in zip(jax.tree.leaves(unrolled), jax.tree.leaves(looped.lower().compile()(*operands)), strict=True):
        assert (a == b).all()
    assert "scan" not in str(jax.make_jaxpr(over(4, "cut", sliding_window=3))(*operands)), "hops are left out"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_travels_stays_split_over_the_other_axes_of_a_mesh(dtype: Any):
    """One row of all heads would be gathered over "tp" first, and every rank of "tp" would send all heads."""
    mesh, spec = mesh_of(sp=4, tp=2), P(None, "sp")
    local = functools.partial(ring_attention, causal=True, axis_name="sp")
    ring = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, axis_names={"sp"}, check_vma=False)
    split = jax.NamedSharding(mesh, P(None, "sp", "tp"))
    operands = [jax.ShapeDtypeStruct((2, 64, 4, 8), dtype, sharding=split)] * 3
    gradients = jax.jit(jax.grad(lambda *x: ring(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    assert "all-gather" not in gradients.lower(*operands).compile().as_text()


def test_an_update_of_some_rows_is_not_fused_with_the_kernel_before_it():
    """Without it, JAX 0.11.2 compiles no float32 gradients of a window in a ring of GPUs ("DUS target must be a fusion
    parameter"). JAX 0.10.2 and 0.12.0 do."""
    mine = KV((jnp.ones((1, 6, 2, 8)), jnp.ones((1, 6, 2, 8))))
    arriving = dataclasses.replace(packed(KV((jnp.ones((1, 2, 2, 8)), jnp.ones((1, 2, 2, 8))))), start=3)
    jaxpr = jax.make_jaxpr(lambda x: total(dataclasses.replace(mine, arrays=x), arriving).arrays)(mine.arrays).jaxpr
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names.index("optimization_barrier") < names.index("scatter-add")


def compiled(ranks: int, length: int, gradient: bool) -> Any:
    shape = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q, k, v, causal=True, mesh=mesh_of(sp=ranks), axis_name="sp")

    f = jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2)) if gradient else attend
    spec = jax.NamedSharding(mesh_of(sp=ranks), P(None, "sp"))
    return jax.jit(f, in_shardings=spec).lower(shape, shape, shape).compile()


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_per_device_depends_on_the_shard_and_not_on_the_ring(gradient: bool):
    packed = 2 * 1024 * 2 * 64 * 4
    small, large = (compiled(n, n * 1024, gradient).memory_analysis().temp_size_in_bytes for n in (5, 8))
    one = compiled(1, 1024, gradient).memory_analysis().temp_size_in_bytes
    assert large <= small + packed // 4
    # Beyond one device, a ring holds its own K,V packed, the K,V that arrive, and at most 0.6 of that size more.
    assert large <= one + 2.6 * packed * (2 if gradient else 1)


def test_a_send_waits_for_all_kernels_of_the_hop_before_and_for_none_of_its_own():
    """So any scheduler may hide the sends of a hop behind its kernels, in both passes."""
    program = jax.make_jaxpr(over(4, causal=True))(*arrays(16))
    forward, backward = (found for body in bodies(program.jaxpr) if (found := order_of(body)).sends)
    before = [set(range(hop)) for hop in range(4)]
    assert [kernels for _, kernels, _ in forward.sends] == before[:3]
    # The first keys; then those of a hop and the gradients of the one before.
    assert [kernels for _, kernels, _ in backward.sends] == [before[hop] for hop in (0, 0, 1, 1, 2, 3)]
    # The keys that a kernel reads wait for the kernels of the hop before too, so that no kernel runs before its turn.
    assert forward.keys == backward.keys == before


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


def test_the_gradient_of_a_half_precision_bias_where_no_rank_needs_anothers_keys():
    mesh = mesh_of(sp=4)
    q, k, v = (jax.random.normal(jax.random.key(seed), (1, 32, 2, 8), jnp.bfloat16) for seed in range(3))
    bias = jax.random.normal(jax.random.key(3), (1, 2, 32, 32), jnp.bfloat16)

    def loss(bias, **options):
        return ring_attention(q, k, v, bias=bias, chunk_size=8, backend="xla", **options).astype(jnp.float32).sum()

    got, want = (jax.grad(loss)(bias, **over) for over in (dict(mesh=mesh, axis_name="sp"), dict(axis_name=())))
    assert got.dtype == jnp.bfloat16
    close(got.astype(jnp.float32), want.astype(jnp.float32), 1e-2)
