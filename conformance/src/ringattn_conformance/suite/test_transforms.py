# SPDX-License-Identifier: Apache-2.0
"""Results stay the same under JAX's transformations and in meshes of several axes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import comparison, oracle, tiers
from ringattn_conformance.cases import NAMED, OPERANDS, Case
from ringattn_conformance.outcomes import agrees, declared, owed, supports
from ringattn_conformance.ranks import RING, Arrays, Local, Placed, Placement, place

CASE, BUSY, SHARED = NAMED["transformed"], NAMED["busy"], NAMED["shared"]
NEEDS = frozenset({Feature.GRADIENTS})


def _loss(placed: Placed, local: Local) -> Any:
    """The scalar function <outputs, cotangents>. The oracle computes the gradients of the same function."""
    everywhere = placed.everywhere(local)
    return lambda operands: _inner(everywhere(operands, placed.fixed), placed.cotangents)


def _inner(results: Arrays, cotangents: Arrays) -> jax.Array:
    return sum((jnp.vdot(x, cotangents[name]) for name, x in results.items()), jnp.zeros(()))


def _check(placed: Placed, gradients: Arrays, where: str) -> None:
    got = placed.natural({OPERANDS[name]: x for name, x in gradients.items()})
    comparison.check(got, placed.case.answer, placed.case, where)


@tiers.mark(tiers.CORE, "grad", "checkpoint")
@pytest.mark.parametrize("transformed", ["grad", "checkpoint", "eager"])
def test_gradients_by_every_transformation(ringattn_backend: str, transformed: str):
    case = declared(ringattn_backend, CASE)
    placed = place(case, Placement(2, check_vma=transformed != "checkpoint"), ringattn_backend)
    with owed(ringattn_backend, case.needs | NEEDS) as right:
        local = jax.checkpoint(placed.local) if transformed == "checkpoint" else placed.local
        gradients = jax.grad(_loss(placed, local))
        found = (gradients if transformed == "eager" else jax.jit(gradients))(placed.operands)
        if right:
            _check(placed, found, transformed)


STACKED = {
    "sinks": Case("layer", causal=True, sinks="each"),
    # So many heads that kernels may compute the gradient of the bias in parts.
    "bias": Case(
        "layer-of-many-heads", causal=True, bias="NT", batch=1, heads=264, kv_heads=264, q_length=192, kv_length=192
    ),
}
"""Calls whose array of this name differs from layer to layer."""


@tiers.mark(tiers.CORE, "sinks")
@pytest.mark.parametrize("name", STACKED)
def test_a_scan_over_layers_is_the_layers_one_by_one(ringattn_backend: str, name: str):
    """The gradients equal those of unrolled layers: XLA for GPUs writes them straight into the stack of all layers."""
    # Not emulated: inside a scan JAX traces a custom_vjp without the axes that vmap binds.
    ranks = min(2, len(jax.devices()))
    case = declared(ringattn_backend, STACKED[name], Feature.SINKS, Feature.BIAS)
    placed = place(case, Placement(ranks), ringattn_backend)
    layers = placed.operands[name], placed.operands[name] + 1

    def layer(x: jax.Array, own: jax.Array) -> jax.Array:
        return x + placed.everywhere()({"q": x, "k": x, "v": x, name: own}, {})["out"]

    def scanned(x: jax.Array, layers: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, own: (jax.checkpoint(layer)(x, own), None), x, layers)[0].sum()

    def unrolled(x: jax.Array, layers: tuple[jax.Array, ...]) -> jax.Array:
        return layer(layer(x, layers[0]), layers[1]).sum()

    with owed(ringattn_backend, placed.case.needs | NEEDS) as right:
        x = placed.operands["q"]
        dx, found = jax.jit(jax.grad(scanned, (0, 1)))(x, jnp.stack(layers))
        want_dx, want = jax.jit(jax.grad(unrolled, (0, 1)))(x, layers)
        if right:
            for of, a, b in (("dx", dx, want_dx), (OPERANDS[name], found, jnp.stack(want))):
                b = np.asarray(b, np.float64)
                faults = comparison.difference(of, a, b, comparison.allowed(of, placed.case.dtype, b, 0.0))
                comparison.fail_if(faults, "scan against layers one by one")


@tiers.mark(tiers.CORE, "checked")
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_grad_inside_shard_map(ringattn_backend: str, check_vma: bool):
    """With `check_vma` JAX sums the gradient of a replicated input over ranks; without, each rank gets its own part."""
    placed = place(declared(ringattn_backend, SHARED), Placement(4, check_vma=check_vma), ringattn_backend)
    if placed.placement.emulated:
        return
    whole = {name for name, x in placed.operands.items() if RING not in placed.spec(name, x.shape)}

    def local(operands: Arrays, fixed: Arrays, cotangents: Arrays) -> Arrays:
        found = jax.grad(lambda operands: _inner(placed.local(operands, fixed), cotangents))(operands)
        return found if check_vma else {n: jax.lax.psum(x, RING) if n in whole else x for n, x in found.items()}

    with owed(ringattn_backend, placed.case.needs | NEEDS) as right:
        mesh, specs = placed.placement.mesh, placed.specs
        sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma)
        found = jax.jit(sharded)(placed.operands, placed.fixed, placed.cotangents)
        if right:
            _check(placed, found, "grad inside shard_map")


MESHES = {
    Placement(2, data=2, heads=2): BUSY,
    Placement(2, "zigzag", data=2, heads=2, check_vma=False): BUSY,
    Placement(4, "striped", heads=2): NAMED["split-heads"],
    Placement(4, data=2, check_vma=False): SHARED,
}


@tiers.mark(tiers.CORE, "ring2-contiguous-data2-heads2")
@pytest.mark.parametrize("placement", MESHES, ids=str)
def test_a_mesh_that_splits_batch_and_heads_too(ringattn_backend: str, placement: Placement):
    agrees(place(declared(ringattn_backend, MESHES[placement]), placement, ringattn_backend))


def _examples(backend: str) -> list[Placed]:
    """Two placed cases that share the sinks and differ in all other arrays and in the seed."""
    case = dataclasses.replace(SHARED, ranges="gaps" if supports(backend, Feature.KEY_RANGE) else None)
    one = place(case, Placement(2), backend)
    other = place(dataclasses.replace(case, seed=1), Placement(2), backend)
    if (ranges := other.inputs.problem.kv_range) is not None:
        other = other.changed(kv_range=[x[::-1] for x in ranges])
    return [one, other.changed(sinks=one.inputs.problem.sinks, seed=7)]


def _per_example(order: str, examples: list[Placed]) -> Arrays:
    """The gradients of both examples in one program; that of the sinks summed for "grad-of-vmap", else per example."""
    first = examples[0]
    operands = {n: jnp.stack([one.operands[n] for one in examples]) for n in first.operands if n != "sinks"}
    fixed = {n: jnp.stack([one.fixed[n] for one in examples]) for n in first.fixed}
    axes = dict.fromkeys(operands, 0) | {"sinks": None}
    cotangents = {n: jnp.stack([one.cotangents[n] for one in examples]) for n in first.cotangents}

    def gradients(function: Any, operands: Arrays, fixed: Arrays, cotangents: Arrays) -> Arrays:
        return jax.vjp(lambda x: function(x, fixed), operands)[1](cotangents)[0]

    if order == "vmap-of-grad":
        found = jax.vmap(functools.partial(gradients, first.everywhere()), (axes, 0, 0))
    else:
        found = functools.partial(gradients, jax.vmap(first.everywhere(), (axes, 0)))
    return jax.jit(found)(operands | {"sinks": first.operands["sinks"]}, fixed, cotangents)


@tiers.mark(tiers.CORE, "vmap-of-grad")
@pytest.mark.parametrize("order", ["grad-of-vmap", "vmap-of-grad"])
def test_one_more_axis_by_vmap(ringattn_backend: str, order: str):
    examples = _examples(ringattn_backend)
    with owed(ringattn_backend, SHARED.needs | NEEDS) as right:
        found = _per_example(order, examples)
        if right:
            answers = [oracle.attend(x.inputs.problem, x.inputs.dout, x.inputs.dlse) for x in examples]
            sinks = found.pop("sinks")
            if sinks.ndim == 1:
                total = np.sum([answer.gradients["dsinks"] for answer in answers], 0)
                tolerance = comparison.allowed("dsinks", "float32", total, 0.0)
                comparison.fail_if(comparison.difference("dsinks", sinks, total, tolerance), order)
            for number, (placed, answer) in enumerate(zip(examples, answers, strict=True)):
                mine = {OPERANDS[name]: x[number] for name, x in found.items()}
                mine |= {"dsinks": sinks[number]} if sinks.ndim > 1 else {}
                comparison.check(placed.natural(mine), answer, placed.case, f"{order}, example {number}")


@tiers.core
def test_without_an_axis_it_is_one_device(ringattn_backend: str):
    case = declared(ringattn_backend, NAMED["everything"])
    placed = place(case, Placement(1), ringattn_backend)
    alone = jax.jit(lambda operands, fixed: placed.local(operands, fixed, axis_name=None))
    with owed(ringattn_backend, case.needs) as right:
        found = alone(placed.operands, placed.fixed)
        if right:
            comparison.check(placed.natural(found), case.answer, case, "without an axis")
