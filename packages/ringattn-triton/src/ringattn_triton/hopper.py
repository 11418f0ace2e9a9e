# SPDX-License-Identifier: Apache-2.0
"""The family of kernels that are written for Hopper: which blocks they take, and how they are launched."""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from ringattn_core.config import FwdParams
from ringattn_core.protocol import Block, Partial

from . import tables
from .launch import launch
from .operands import Facts, Operands
from .schedules import Target

PLACES: Final = 132
"""How many programs run at a time: one on each multiprocessor of the largest Hopper. More only wait for a place."""
_CONSUMED: Final = 64
_TOGETHER: Final = 512
"""How many tiles of queries of some heads make enough work for no place to be left alone with a long one."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel of this family runs; `ordered` lets one consumer multiply at a time."""

    consumers: int
    kv_tile: int
    stages: int
    ordered: bool
    limit: int
    """Registers of a thread when a program begins."""
    registers: int
    """Registers of a consumer's thread, which it takes over from the producer's."""


_FORWARD: Final = {
    64: Plan(3, 128, 2, True, 128, 160),
    128: Plan(2, 128, 2, False, 168, 240),
}
"""By head size: the fastest of those timed."""


def takes(block: Block, facts: Facts, target: Target) -> bool:
    """Whether this family computes the output of a block.

    It does where it is faster. Of a bias and of dropout it has no kernels: four warps that draw numbers or wait for a
    bias, and nothing to fill in for them, were slower than many programs at a time. With heads of 64 products are short
    beside anything that comes to them.
    """
    plan = _FORWARD.get(facts.head_dim)
    if target != Target("cuda", 90) or plan is None or block.q.dtype.itemsize != 2 or block.kv.ndim != 5:
        return False
    fixed = block.rule.fwd_params != FwdParams()
    short = facts.q_length < plan.consumers * _CONSUMED or facts.kv_length < plan.kv_tile
    laden = facts.head_dim < 128 and (facts.capped or facts.segments or facts.masks or facts.dense)
    return facts.plain and not (facts.dropout or fixed or short or laden)


def forward(given: Operands, block: Block, partial: Partial) -> Partial:
    """`partial` continued with the keys of a block that this family takes."""
    from .kernels.hopper_forward import forward as kernel

    facts = given.facts
    plan = _FORWARD[facts.head_dim]
    table = tables.table(given, block, plan.consumers * _CONSUMED, plan.kv_tile, programs=_TOGETHER)
    continued = [None, None] if partial.empty else [partial.out, partial.lse]
    arrays = [*given.arrays, table.bounds, table.tiles, *continued, jnp.zeros(1, jnp.int32)]
    last = len(arrays) - 1
    batch, _, heads, _ = block.q.shape
    masked = any((facts.below, facts.above, facts.segments, facts.padded, facts.masks, facts.dense))
    out, lse, _ = launch(
        kernel,
        arrays,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (partial.out, partial.lse, arrays[-1])],
        grid=(min(PLACES, table.visits.rows * batch * heads),),
        warps=4,
        stages=1,
        registers=plan.limit,
        aliases={last: 2} if partial.empty else {last - 2: 0, last - 1: 1, last: 2},
        name="ringattn_hopper_forward",
        F=facts,
        V=table.visits,
        BATCH=batch,
        CONSUMERS=plan.consumers,
        KV_TILE=plan.kv_tile,
        STAGES=plan.stages,
        ORDERED=plan.ordered,
        MASKED=masked or facts.kv_length % plan.kv_tile != 0,
        FRESH=partial.empty,
        REGISTERS=plan.registers,
    )
    return Partial(out, lse)
