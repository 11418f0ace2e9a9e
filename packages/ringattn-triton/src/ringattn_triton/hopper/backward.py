# SPDX-License-Identifier: Apache-2.0
"""The backward pass in one kernel for Hopper: which blocks it takes, and how it is launched."""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32
from ringattn_core import BwdParams
from ringattn_core.contract.protocol import Block, Gradients

from .. import kernel_inputs, visited_tiles
from ..kernel_inputs import LOG2_E, BlockConstants, KernelInputs
from ..launch import launch
from .backward_plan import BackwardPlan, plan_of
from .schedules import PROGRAMS

ORDERED_BY_DEFAULT: Final = False
"""Whether blocks whose bits must repeat get the ordered form. Two passes have been certified on a GPU, it has not."""
_TOGETHER: Final = 512
"""How many turns the heads that go together have: few enough for their queries to stay in the cache."""
_ALL_TOGETHER: Final = 2**30
"""All heads go together where turns wait for each other: few turns of one head then run at a time."""
_REGISTERS_AT_START: Final = 168


def why_not(block: Block, constants: BlockConstants) -> str | None:
    """Why the one-pass kernel does not take the block, or `None` where it does."""
    if plan_of(constants) is None:
        return "the one-pass backward kernel has no heads of these sizes"
    if block.rule.bwd_params != BwdParams():
        return "the caller fixes the schedule"
    if constants.capped or constants.bias or constants.slopes or constants.dropout:
        return "the one-pass backward kernel has no soft cap, bias, ALiBi and dropout"
    if constants.masks:
        return "the one-pass backward kernel has no dense masks and no masks by predicate"
    if not (block.rule.fused_backward or ORDERED_BY_DEFAULT):
        return "the caller wants the same bits at every run, for which two passes are the default"
    return None if constants.plain else "the scale is not positive"


def backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"] | None,
) -> Gradients:
    """The gradients of a block that the kernel takes; their bits repeat unless the rule allows `fused_backward`."""
    from .backward_kernel import backward as backward_kernel
    from .dq_order import finish_dq

    inputs = kernel_inputs.of_block(block, fast=True)
    constants = inputs.constants
    batch, length, heads, dim = block.q.shape
    ordered = not block.rule.fused_backward
    plan = plan_of(constants)
    assert plan is not None
    table = visited_tiles.table(
        inputs, block, plan.q_tile, plan.kv_tile, by_keys=True, programs=_ALL_TOGETHER if ordered else _TOGETHER
    )
    masked = any((constants.below, constants.above, constants.segments, constants.padded))
    masked = masked or length % plan.q_tile != 0 or constants.kv_length % plan.kv_tile != 0
    plan = dataclasses.replace(plan, masked=masked, ordered=ordered)
    q_tiles = table.shape.columns
    more = [(0, 0), (0, 0), (0, q_tiles * plan.q_tile - length)]
    # A row that sees nothing, or lies past the end, weighs nothing.
    lse = jnp.pad(jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E), more, constant_values=jnp.inf)
    counters = jnp.zeros(1 + (plan.writers * batch * heads * q_tiles if ordered else 0), jnp.int32)
    pieces = plan.pieces(dim)
    sums = jnp.zeros(batch * heads * q_tiles * pieces * 4096, jnp.float32)
    ranks = _ranks(inputs, block, plan) if ordered else None
    arrays = [
        *inputs.arrays, table.bounds, table.tiles, dout.astype(block.q.dtype), lse, jnp.pad(-delta, more), ranks,
        counters, sums,
    ]  # fmt: skip
    dk, dv, _, sums = launch(
        backward_kernel,
        arrays,
        [
            *(jax.ShapeDtypeStruct(x.shape, block.q.dtype if block.final else jnp.float32) for x in (block.k, block.v)),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
            jax.ShapeDtypeStruct(sums.shape, sums.dtype),
        ],
        grid=(min(PROGRAMS, table.shape.rows * batch * constants.kv_heads),),
        warps=4,
        stages=1,
        registers=_REGISTERS_AT_START,
        aliases={len(arrays) - 2: 2, len(arrays) - 1: 3},
        name="ringattn_hopper_backward",
        F=constants,
        T=table.shape,
        BATCH=batch,
        PLAN=plan,
    )
    (dq,) = launch(
        finish_dq,
        [sums, dq],
        [jax.ShapeDtypeStruct(block.q.shape, block.q.dtype if block.final else jnp.float32)],
        grid=(batch * heads * q_tiles * pieces,),
        warps=4,
        stages=1,
        aliases={1: 0} if dq is not None and not block.final else {},
        name="ringattn_hopper_finish_dq",
        Q_LENGTH=length,
        HEADS=heads,
        DIM=dim,
        Q_TILES=q_tiles,
        SCALE=constants.scale,
        FRESH=dq is None,
        Q_TILE=plan.q_tile,
        PIECES=pieces,
    )
    return Gradients(dq, dk, dv)


def _ranks(inputs: KernelInputs, block: Block, plan: BackwardPlan) -> Int32[Array, "g rows columns"]:
    """For each key tile and query tile that see each other, how many earlier key tiles see that query tile."""
    seen = jnp.swapaxes(visited_tiles.seen(inputs, block, plan.q_tile, plan.kv_tile).some, 1, 2).astype(jnp.int32)
    return jnp.cumsum(seen, 1, dtype=jnp.int32) - seen
