# SPDX-License-Identifier: Apache-2.0
"""The log-sum-exp: natural, float32, with the sinks in it, and differentiable."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import oracle, tiers, tolerances
from ringattn_conformance.cases import NAMED, OPERANDS
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import Placement, answer_of, place, run, with_gradients

RING = 4


@tiers.mark(tiers.CORE, "lse", "sinks-each")
@pytest.mark.parametrize("name", ["lse", "sinks-each", "segments-unseen-rank", "causal-bfloat16", "dropout-lse"])
def test_it_is_the_natural_logarithm_of_the_whole_denominator(ringattn_backend: str, name: str):
    case = NAMED[name]
    placed = place(case, Placement(RING), ringattn_backend)
    with owed(ringattn_backend, case.needs) as right:
        got = run(placed, gradients=False)
        if right:
            tolerances.check({"lse": got["lse"]}, answer_of(case, RING), case, placed.inputs)


@tiers.core
def test_a_row_that_sees_nothing_has_minus_infinity_or_its_sinks_alone(ringattn_backend: str):
    case = NAMED["sinks-empty-rows"]
    placed = place(case, Placement(RING), ringattn_backend)
    with owed(ringattn_backend, case.needs) as right:
        lse = run(placed, gradients=False)["lse"]
        if right:
            half = lse.shape[-1] // 2
            sinks = np.asarray(placed.inputs.problem.sinks)[None, :, None]
            np.testing.assert_allclose(lse[..., :half], np.broadcast_to(sinks, lse[..., :half].shape), atol=1e-6)
    case = NAMED["segments-unseen-rank"]
    with owed(ringattn_backend, case.needs) as right:
        lse = run(place(case, Placement(RING), ringattn_backend), gradients=False)["lse"]
        if right:
            assert np.isneginf(lse[..., : lse.shape[-1] // 2]).all()


@tiers.mark(tiers.CORE, "sinks-each")
@pytest.mark.parametrize("name", ["sinks-each", "sinks-empty-rows", "dropout-lse"])
def test_a_gradient_through_the_lse_alone_is_exact(ringattn_backend: str, name: str):
    case = NAMED[name]
    placed = place(case, Placement(RING, "striped"), ringattn_backend)
    with owed(ringattn_backend, case.needs | placed.placement.needs | {Feature.GRADIENTS}) as right:
        dout, dlse = placed.cotangents
        program = jax.jit(with_gradients(placed.everywhere()))
        _, found = program(placed.operands, placed.fixed, (jnp.zeros_like(dout), dlse))
        if right:
            inputs = dataclasses.replace(placed.inputs, dout=np.zeros_like(placed.inputs.dout))
            answer = oracle.attend(inputs.problem, inputs.dout, inputs.dlse)
            got = placed.natural({OPERANDS[operand]: x for operand, x in found.items()})
            tolerances.check(got, answer, case, inputs)


def test_asking_for_it_does_not_change_the_output(ringattn_backend: str):
    case = NAMED["causal"]
    with owed(ringattn_backend, case.needs) as right:
        with_lse = run(place(case, Placement(RING), ringattn_backend), gradients=False)["out"]
        placed = place(case, Placement(RING), ringattn_backend)
        alone = dataclasses.replace(placed, case=dataclasses.replace(case, lse=False))
        without = run(alone, gradients=False)["out"]
        if right:
            assert np.array_equal(with_lse, without)
