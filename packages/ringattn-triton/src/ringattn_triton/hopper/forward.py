# SPDX-License-Identifier: Apache-2.0
# pyright: standard, reportUndefinedVariable=false, reportInvalidTypeForm=false
"""The forward pass on Hopper: which blocks its kernel takes, and how it is launched."""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from ringattn_core import FwdParams
from ringattn_core.contract.protocol import Block, Partial

from .. import kernel_inputs, sparsity, visited_tiles
from ..kernel_inputs import BlockConstants
from ..launch import launch
from ..launch.target import Target
from ..portable import family as portable
from . import plans

_TURNS_AT_ONCE: Final = 512
"""The wanted number of turns (query tiles), counted over all heads that run side by side: enough to fill the device
until the last long turn ends."""
_TURNS_WITH_DOCUMENTS: Final = 4096
"""The same number for calls with documents (`sparsity.scattered`). There the last turns of a head belong to one
document. They may be long, and too few to occupy all multiprocessors."""
_BOUND: Final = 73.0
"""The largest soft cap, in units of log2, with which scores need no row maximum. (A cap of 50 is 72.1 such units.) The
kernel then subtracts half of the cap from all scores. float32 reaches 2^127, so 2^(127 - 73 / 2) = 2^90 is left for the
number of keys and large values."""


def why_not(block: Block, constants: BlockConstants) -> str | None:
    """Why the forward kernel cannot compute the block, or is slower than the portable one; `None` if neither is so."""
    plan = plans.forward(constants)
    if plan is None:
        return "no forward kernel has heads of these sizes, or a soft cap or dropout with them"
    if block.rule.fwd_params != FwdParams():
        return "the caller fixes the schedule"
    if constants.q_length < plan.q_tile or constants.kv_length < plan.kv_tile:
        return "the block is shorter than a tile"
    if constants.bias and constants.head_dim != 128:
        return "the forward kernel takes a bias only with heads of 128"
    if constants.bias and (reason := plans.why_not_bias(block, constants, "forward")):
        return reason
    return "each tile has too little to do" if _too_little(block, constants) else None


def forward(block: Block, partial: Partial | None, target: Target) -> Partial:
    """Continues the online softmax from `partial` (`None`: from nothing) with a block that the kernel takes."""
    from .forward_kernel import forward as forward_kernel

    inputs = kernel_inputs.of_block(block, fast=True)
    constants = inputs.constants
    plan = _plan(block, constants, partial)
    at_once = _TURNS_WITH_DOCUMENTS if sparsity.scattered(block) else _TURNS_AT_ONCE
    table = visited_tiles.table(block, plan.q_tile, plan.kv_tile, rows_at_once=at_once)
    before = portable.before_of(block, partial)
    of_tiles = inputs.in_tiles(plan.q_tile, plan.kv_tile, of_all_keys=True)
    arrays = [*of_tiles, table.bounds, table.tiles, *before, table.counters]
    outputs, last = portable.results(block), len(arrays) - 1
    batch, _, heads, _ = block.q.shape
    *found, _ = launch(
        forward_kernel,
        arrays,
        [*outputs, jax.ShapeDtypeStruct((1,), jnp.int32)],
        grid=(min(plans.PROGRAMS, table.shape.rows * batch * heads),),
        registers=plan.registers_at_start,
        aliases={last: len(outputs)} | {last - len(before) + i: i for i, x in enumerate(before) if x is not None},
        name="ringattn_hopper_forward",
        F=constants,
        T=table.shape,
        BATCH=batch,
        PLAN=plan,
        **portable.unused(block),
    )
    return Partial(*found)


def _plan(block: Block, constants: BlockConstants, partial: Partial | None) -> plans.ForwardPlan:
    """The `ForwardPlan` with which the forward kernel runs on `block`, which it must support (`why_not`)."""
    plan = plans.forward(constants)
    assert plan is not None
    # Results can take the place of the queries in shared memory if both have the same shape and dtype.
    alike = block.final and constants.head_dim == constants.value_dim
    return dataclasses.replace(
        plan,
        # With documents, consumers that begin products in any order are faster.
        in_rotation=plan.in_rotation and not sparsity.scattered(block),
        # A bias takes the shared memory that would hold the queries of the next turn.
        q_stages=1 if constants.bias else plan.q_stages,
        masked=constants.masked or constants.kv_length % plan.kv_tile != 0,
        fresh=partial is None or partial.out is None,
        from_lse=partial is not None,
        bounded=constants.capped and constants.plain and block.q.dtype == jnp.bfloat16 and constants.fold <= _BOUND,
        results_by_tma=alike and plan.q_stages == 2 and not constants.bias,
        one_sided=constants.slopes and block.reach.causal,
    )


def _too_little(block: Block, constants: BlockConstants) -> bool:
    """Whether a turn (one query tile) has so few key tiles, or such small products, that its begin and end dominate."""
    if constants.head_dim > 64 or plans.short_rows(constants):
        return False
    short = block.reach.span < 2048 or constants.q_length < 2048
    return short or sparsity.scattered(block) or constants.masks
