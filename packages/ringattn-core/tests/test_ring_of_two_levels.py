# SPDX-License-Identifier: Apache-2.0
"""Promises of a ring of two levels: a send along the outer ring has a whole round of the inner ring to arrive in."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from ringattn_core import ring_attention
from ringattn_core.contract import ordering
from ringattn_core.ring import plan
from ringattn_testing.rings import close, graded, in_order_of, mesh_of, query_key_value
from ringattn_testing.traced_calls import bodies, equations, forget_traced_calls, order_of

SPEC = PartitionSpec(None, ("outer", "inner"))


@pytest.mark.parametrize(("outer", "inner"), [(2, 4), (4, 2)])
def test_in_a_scan_both_levels_compute_what_one_device_does(
    monkeypatch: pytest.MonkeyPatch, outer: int, inner: int
) -> None:
    """The mesh is explicit, and has the inner axis first."""
    mesh = mesh_of(AxisType.Explicit, inner=inner, outer=outer)
    ring: dict[str, Any] = {"mesh": mesh, "axis_name": ("outer", "inner"), "layout": "striped"}
    attend = in_order_of("striped", outer * inner, functools.partial(ring_attention, causal=True, **ring))
    operands = query_key_value(1, 16, 4, 2, 4)
    monkeypatch.setattr(plan, "UNROLLED", 1)
    forget_traced_calls()
    program = jax.make_jaxpr(functools.partial(graded, attend))(*operands)
    got = graded(attend, *operands)
    forget_traced_calls()
    assert str(program).count(" scan[") == {4: 2, 2: 4}[outer], "of rounds, or of the hops of both rounds"
    close(got, graded(functools.partial(ring_attention, causal=True), *operands), 1e-5, 1e-4)


def traced(outer: int, inner: int, key_heads: int) -> Any:
    """The program of both passes, on an abstract mesh that needs no devices."""
    mesh = AbstractMesh((outer, inner), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2)
    shapes = [jax.ShapeDtypeStruct((1, 4 * outer * inner, heads, 4), jnp.float32) for heads in (2, *[key_heads] * 2)]
    attend = functools.partial(ring_attention, axis_name=("outer", "inner"))
    ring = jax.shard_map(attend, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
    return jax.make_jaxpr(jax.grad(lambda *x: ring(*x).sum(), (0, 1, 2)))(*shapes).jaxpr


def test_however_many_ranks_the_program_has_few_hops() -> None:
    kernels = sum(equation.primitive.name == "custom_vmap_call" for equation in equations(traced(8, 16, 2)))
    assert kernels == 3 * 3 + 4 * 4, "three rounds of three hops forward, and four of four backward"


def test_a_send_between_groups_waits_for_the_round_before_and_no_kernel_of_its_round_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a ring of 3 by 2 ranks. On CPU, where a send blocks, kernels wait for all sends of their hop."""
    monkeypatch.setattr(ordering, "tie_on_cpu", lambda x, token: x)
    forget_traced_calls()
    program = traced(3, 2, 1)
    forget_traced_calls()
    sends = [found for body in bodies(program) if (found := order_of(body).sends)]
    # A send that waits for some kernel waits for all before that one.
    assert all(kernels == set(range(len(kernels))) for found in sends for _, kernels, _ in found)
    forward, backward = ([(axis, len(kernels), first) for axis, kernels, first in found] for found in sends)
    assert forward == [
        ("outer", 0, 2), ("inner", 0, 1), ("outer", 2, 4), ("inner", 2, 3), ("inner", 4, 5)
    ]  # fmt: skip
    assert backward == [
        ("outer", 0, 0),  # the first keys
        ("outer", 0, 2), ("inner", 0, 0), ("inner", 1, 2),  # the round of group g - 1
        ("outer", 2, 4), ("inner", 2, 2), ("inner", 3, 4),  # that of group g - 2; its first send has gradients
        ("outer", 4, None), ("inner", 4, 4), ("inner", 5, None),  # the own group
    ]  # fmt: skip
