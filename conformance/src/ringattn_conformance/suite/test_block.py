# SPDX-License-Identifier: Apache-2.0
"""A block kernel without a ring continues from earlier keys, and its gradients are the oracle's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.backends import discovery
from ringattn_core.contract.features import Feature
from ringattn_core.contract.protocol import BlockKernel, Gradients
from ringattn_core.placement.arrays import axes_with, cleaned

from ringattn_conformance import notes, tiers, tolerance_factor, tolerances, wrong
from ringattn_conformance.blocks import blocks_of
from ringattn_conformance.cases import CASES, Case
from ringattn_conformance.lattice import points
from ringattn_conformance.outcomes import supports

SHARDS = 2
NEEDS = frozenset({Feature.GRADIENTS, Feature.CROSS_LENGTHS})
"""A block has all queries and half of the keys."""
_OF_KEYS = axes_with(Gradients, "S")
"""The gradients that each block gives for its own keys. The others are sums over the blocks."""


CHOSEN = tuple(case for case in CASES if case.sinks is None and case.kv_length % SHARDS == 0)


def _kernel(backend: str) -> BlockKernel | None:
    """The backend's block kernel; `None` for a ring function, and for a kernel that needs the blocks of a ring."""
    registration = discovery.get(backend)
    kernel = registration.implementation() if registration.descriptor().kernel else None
    return None if getattr(kernel, "static_masks", False) else kernel


def _forward_and_backward(kernel: BlockKernel, blocks: list[Any], dout: Any, dlse: Any) -> tuple[Any, Any, list[Any]]:
    partial = None
    for block in blocks:
        partial = kernel.forward(block, partial)
    assert partial is not None
    delta = jnp.einsum("btnh,btnh->bnt", dout.astype(jnp.float32), partial.out) - dlse
    dq, found = None, []
    for block in blocks:
        gradients = kernel.backward(block, dout, partial.lse, delta, dq)
        dq = gradients.dq
        found.append(gradients)
    return partial, dq, found


@tiers.mark(tiers.CORE, *(point.case.name for point in points() if point.tier == tiers.CORE and point.case in CHOSEN))
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_two_blocks_in_a_row_give_the_oracle_s_output_and_gradients(ringattn_backend: str, case: Case):
    kernel = _kernel(ringattn_backend)
    if kernel is None or not supports(ringattn_backend, *case.needs, *NEEDS):
        return
    notes.needs(case.needs | NEEDS)
    inputs, answer = case.inputs, case.answer
    blocks = [dataclasses.replace(one, bias_fixed=case.bias_fixed) for one in blocks_of(case, inputs, SHARDS)]
    dlse = np.zeros_like(answer.lse, np.float32) if inputs.dlse is None else inputs.dlse
    dout = cleaned(jnp.asarray(inputs.dout), blocks[0].q_segments)
    program = jax.jit(lambda blocks, dout, dlse: _forward_and_backward(kernel, blocks, dout, dlse))
    partial, dq, found = program(blocks, dout, jnp.asarray(dlse))
    got = {"out": partial.out, "lse": partial.lse, "dq": dq}
    for name in answer.gradients.keys() - ({"dq", "dbias"} if case.bias_fixed else {"dq"}):
        parts = [np.asarray(getattr(one, name)) for one in found]
        axis = _OF_KEYS.get(name)
        got[name] = np.sum(parts, 0)[0] if axis is None else np.concatenate(parts, axis)
    faults = [f"{n}: got dtype {x.dtype}, want float32" for n, x in got.items() if x.dtype != np.float32]
    faults += tolerances.against_oracle(got, answer, tolerances.dtype_of(case), case.value_gain)
    if not tolerance_factor.half_partials:
        faults += tolerances.rounded_to_half(got, answer)
    wrong.fail_if(faults, f"case {case.name!r} as {SHARDS} blocks")


@tiers.core
def test_a_block_that_nobody_sees_changes_nothing(ringattn_backend: str):
    kernel = _kernel(ringattn_backend)
    if kernel is None or not supports(ringattn_backend, Feature.CAUSAL, Feature.FLOAT32):
        return
    case = Case("unseen-block", causal=True)
    own, unseen = blocks_of(case, case.inputs, SHARDS)
    own, unseen = (block.map_queries(lambda x, axis: x[:, :24] if axis == 1 else x) for block in (own, unseen))
    before = jax.jit(lambda: kernel.forward(own, None))()
    after = jax.jit(lambda: kernel.forward(unseen, before))()
    assert np.array_equal(before.out, after.out)
    assert np.array_equal(before.lse, after.lse)
