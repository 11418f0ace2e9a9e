# SPDX-License-Identifier: Apache-2.0
"""Which kernel gives the output of a block, and on what."""

import dataclasses
import functools

import jax
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.contract.varying import align, axes_of

from . import hopper, operands, packing, schedules, tables
from .kernels.forward import forward as forward_kernel
from .launch import launch
from .operands import Operands
from .schedules import Target


@functools.partial(jax.jit, static_argnums=2)
def forward(block: Block, partial: Partial, target: Target) -> Partial:
    """`partial` continued with the keys of the block."""
    block, partial = align((block, partial), axes_of(block, partial))
    given = operands.of(block, fast=target.kind == "cuda")
    schedules.refuse_large_heads(given.facts)
    on_hopper = hopper.takes(block, given.facts, target)
    own = block.own
    if own is not None and given.facts.own:
        if on_hopper and hopper.looks(given.facts, partial):
            return hopper.looking(given, block, partial, own)
        own = packing.look(own)
        given = given.mended(own, poison=True)
    done = hopper.forward(given, block, partial) if on_hopper else _portable(given, block, partial, target)
    return done if own is None else dataclasses.replace(done, found=own.found)


def _portable(given: Operands, block: Block, partial: Partial, target: Target) -> Partial:
    facts = given.facts
    schedule = schedules.forward(facts, block.q.dtype.itemsize, block.rule.fwd_params, target)
    table = tables.table(given, block, schedule.q_tile, schedule.kv_tile)
    continued = [None, None] if partial.empty else [partial.out, partial.lse]
    arrays = [*given.tiled(schedule.kv_tile), table.bounds, table.tiles, *continued]
    before = len(arrays) - 2
    out, lse, rest = launch(
        forward_kernel,
        arrays,
        operands.results(partial),
        grid=(table.visits.rows * block.q.shape[0] * block.q.shape[2],),
        warps=schedule.warps,
        stages=schedule.stages,
        aliases={} if partial.empty else {before: 0, before + 1: 1},
        name="ringattn_forward",
        F=facts,
        V=table.visits,
        Q_TILE=schedule.q_tile,
        KV_TILE=schedule.kv_tile,
        DIM=operands.padded_dim(facts.head_dim),
        VALUE_DIM=operands.padded_dim(facts.value_dim),
        HELD=schedule.held,
        FRESH=partial.empty,
        SPLIT=partial.rest is not None,
    )
    return Partial(out, lse, rest=rest if partial.rest is not None else None)
