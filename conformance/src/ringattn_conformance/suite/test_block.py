# SPDX-License-Identifier: Apache-2.0
"""Calls block kernels without a ring: a second block continues from the first one's result, as the oracle says."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.backends import discovery
from ringattn_core.call.validation import validated
from ringattn_core.config import RingAttentionConfig
from ringattn_core.contract import packing
from ringattn_core.contract.features import Feature
from ringattn_core.contract.merge import merged
from ringattn_core.contract.protocol import Block, BlockKernel, Gradients, Partial
from ringattn_core.placement.arrays import axes_with, zero_padding
from ringattn_core.ring import blocks as ring_blocks
from ringattn_core.ring import engine
from ringattn_core.ring.kv import KV

from ringattn_conformance import comparison, tiers
from ringattn_conformance.cases import CASES, DTYPES, OPERANDS, Case, keywords
from ringattn_conformance.outcomes import supports
from ringattn_conformance.ranks import static_options

SHARDS = 2
NEEDS = frozenset({Feature.GRADIENTS, Feature.CROSS_LENGTHS})
"""CROSS_LENGTHS, because a block has all queries but only half of the keys."""
_OF_KEYS = axes_with(Gradients, "S")
"""The gradients with a key axis, and that axis: each block gives its own keys' part. The rest is summed over blocks."""
CHOSEN = tuple(case for case in CASES if case.sinks is None and case.kv_length % SHARDS == 0 and not case.forward)


def _kernel(backend: str) -> BlockKernel | None:
    """The backend's block kernel; `None` for a ring function, and for a kernel with `static_masks`."""
    registration = discovery.get(backend)
    kernel = registration.implementation() if registration.descriptor().kernel else None
    return None if getattr(kernel, "static_masks", False) else kernel


def _blocks(case: Case) -> list[Block]:
    """A block of each half of the keys, with all queries, made by core's ring engine."""
    options, inputs = static_options(case), case.inputs
    config = options.pop("cfg", RingAttentionConfig())
    options |= {"fwd_params": config.fwd_params, "bwd_params": config.bwd_params}
    given = {name: getattr(inputs.problem, name) for name in OPERANDS} | inputs.fixed
    arrays = keywords({name: jnp.asarray(x) for name, x in given.items() if x is not None})
    call = validated(**arrays, **options, ranks=1)
    ring = engine.ring_of(None, call, (0, 1))
    queries = ring_blocks.queries_of(ring, call)
    half = call.key.shape[1] // SHARDS
    kv = [
        KV(packing.pack(call.key[:, rows], call.value[:, rows]), rows.start)
        for rows in (slice(0, half), slice(half, None))
    ]
    blocks = [ring_blocks.block_of(ring, call, queries, one, 0) for one in kv]
    return [dataclasses.replace(block, bias_fixed=case.bias_fixed) for block in blocks]


def _forward_and_backward(kernel: BlockKernel, blocks: list[Block], dout: Any, dlse: Any) -> tuple[Any, Any, list[Any]]:
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


@tiers.core
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_two_blocks_in_a_row_give_the_oracle_s_output_and_gradients(ringattn_backend: str, case: Case):
    kernel, case = _kernel(ringattn_backend), case.with_heads_for(ringattn_backend)
    if kernel is None or not supports(ringattn_backend, *case.needs, *NEEDS):
        return
    inputs, answer = case.inputs, case.answer
    blocks = _blocks(case)
    dlse = np.zeros_like(answer.lse, np.float32) if inputs.dlse is None else inputs.dlse
    dout = zero_padding(jnp.asarray(inputs.dout), blocks[0].q_segments)
    program = jax.jit(lambda blocks, dout, dlse: _forward_and_backward(kernel, blocks, dout, dlse))
    partial, dq, found = program(blocks, dout, jnp.asarray(dlse))
    got = {"out": partial.out, "lse": partial.lse, "dq": dq}
    for name in answer.gradients.keys() - ({"dq", "dbias"} if case.bias_fixed else {"dq"}):
        parts = [np.asarray(getattr(one, name)) for one in found]
        axis = _OF_KEYS.get(name)
        got[name] = np.sum(parts, 0)[0] if axis is None else np.concatenate(parts, axis)
    faults = [f"{n}: got dtype {x.dtype}, want float32" for n, x in got.items() if x.dtype != np.float32]
    faults += comparison.against_oracle(got, answer, case)
    if not comparison.half_partials:
        faults += comparison.rounded_to_half(got, answer)
    lengths = " and ".join(str(block.kv_length) for block in blocks)
    comparison.fail_if(faults, comparison.told(case, f"as blocks of {lengths} keys"), got)


@tiers.core
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_begins_from_the_log_sum_exp_of_sinks(ringattn_backend: str, dtype: str):
    """Continuing `Partial(None, lse)`, of weight `exp(lse)` and no value, gives its merge with the block's own result.

    In the block that comes first here, the first half of the queries sees no key. Weights of 0 and NaN are among them.
    """
    kernel, asked = _kernel(ringattn_backend), supports(ringattn_backend, Feature.MAX_LOGITS)
    case = Case(f"from-sinks-{dtype}", causal=True, dtype=dtype, max_logits=asked).with_heads_for(ringattn_backend)
    if kernel is None or not supports(ringattn_backend, *case.needs, Feature.SINKS, Feature.CROSS_LENGTHS):
        return
    after, before = _blocks(case)
    rows = case.batch, case.heads, case.q_length
    least = jnp.full(rows, -jnp.inf)
    lse = jnp.linspace(-9.0, 9.0, least.size).at[::5].set(-jnp.inf).at[::7].set(jnp.nan).reshape(rows)
    sinks, nothing = (Partial(None, x, least if asked else None) for x in (lse, least))

    @jax.jit
    def both() -> dict[str, tuple[Partial, Partial]]:
        alone = [kernel.forward(block, None) for block in (before, after)]
        first, whole = merged([sinks, alone[0]]), merged([sinks, *alone])
        begun = kernel.forward(before, sinks)
        return {
            "after one block": (begun, first),
            "after one block, the only one": (kernel.forward(dataclasses.replace(before, final=True), sinks), first),
            "after two blocks": (kernel.forward(after, begun), whole),
            "after one block, without weight": (kernel.forward(before, nothing), alone[0]),
        }

    for where, (got, want) in both().items():
        found = {name: x for name, x in vars(got).items() if x is not None}
        faults = []
        for name, x in found.items():
            wanted = np.asarray(getattr(want, name))
            faults += comparison.difference(name, x, wanted, comparison.allowed(name, dtype, wanted, 0.0))
        comparison.fail_if(faults, comparison.told(case, where), found)


@tiers.core
def test_a_block_that_nobody_sees_changes_nothing(ringattn_backend: str):
    kernel = _kernel(ringattn_backend)
    if kernel is None or not supports(ringattn_backend, Feature.CAUSAL, Feature.FLOAT32):
        return
    case = Case("unseen-block", causal=True).with_heads_for(ringattn_backend)
    own, unseen = _blocks(case)
    own, unseen = (block.tile(0, 24, 0, block.kv_length) for block in (own, unseen))
    before = jax.jit(lambda: kernel.forward(own, None))()
    after = jax.jit(lambda: kernel.forward(unseen, before))()
    assert np.array_equal(before.out, after.out)
    assert np.array_equal(before.lse, after.lse)
