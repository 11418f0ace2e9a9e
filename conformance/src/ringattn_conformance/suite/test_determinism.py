# SPDX-License-Identifier: Apache-2.0
"""Repeated runs with the same inputs give the same bits, forward and backward."""

import jax
import numpy as np
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import tiers
from ringattn_conformance.cases import NAMED
from ringattn_conformance.outcomes import owed
from ringattn_conformance.ranks import Placement, place, with_gradients


@tiers.mark(tiers.CORE, "long-causal")
@pytest.mark.parametrize("name", ["everything", "long-causal", "causal-bfloat16"])
def test_a_repeated_run_gives_the_same_bits(ringattn_backend: str, name: str):
    case = NAMED[name]
    placed = place(case, Placement(2), ringattn_backend)
    with owed(ringattn_backend, case.needs | {Feature.GRADIENTS}) as right:
        program = jax.jit(with_gradients(placed.everywhere()))
        runs = [jax.tree.map(np.asarray, program(placed.operands, placed.fixed, placed.cotangents)) for _ in range(3)]
        if right:
            for again in runs[1:]:
                different = jax.tree.map(lambda a, b: int((_bits(a) != _bits(b)).sum()), runs[0], again)
                assert not any(jax.tree.leaves(different)), f"elements whose bits differ: {different}"


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])
