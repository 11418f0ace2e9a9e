# SPDX-License-Identifier: Apache-2.0
"""Which kernels give the gradients of a block, on what, and how their results come together."""

import dataclasses
import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core.protocol import Block, Gradients
from ringattn_core.varying import align, axes_of

from . import bias_gradient, operands, schedules, tables
from .kernels.backward_keys import backward_keys
from .kernels.backward_queries import backward_queries
from .launch import launch
from .operands import Facts, Operands
from .schedules import Schedule, Target

_PACKED: Final = 64
"""Up to which head size keys and values are read packed: the largest tiles then leave no registers for two places."""


@functools.partial(jax.jit, static_argnums=5)
def backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"] | None,
    target: Target,
) -> Gradients:
    """The gradients that this block's keys give and get; `dq` continues, or all is final where there is none.

    Two kernels, one that owns keys and one that owns queries: no program adds to what another one does, and on the
    devices measured that is faster than one kernel that adds to `dq` atomically.
    """
    block, dout, lse, delta, dq = align((block, dout, lse, delta, dq), axes_of(block, dout, lse, delta, dq))
    if block.q.shape[-1] <= _PACKED:
        block = dataclasses.replace(block, own=None)
    given = operands.of(block, fast=target.kind == "cuda").mended(block.own, poison=False)
    schedules.refuse_large_heads(given.facts)
    # A row that sees nothing has only scores of -inf: they weigh nothing beside any lse that is a number.
    finite = jnp.where(lse == -jnp.inf, 0.0, lse * operands.LOG2_E)
    rows = [dout.astype(block.q.dtype), finite, delta]
    dk, dv = _of_keys(block, given.turned(), rows, dq is None, target)
    dq, dslopes, dbias = _of_queries(block, given, rows, dq, target)
    if block.slopes is not None and dslopes is not None:
        by_batch = dslopes.sum(2)
        dslopes = by_batch.sum(0, keepdims=True) if block.slopes.shape[0] == 1 else by_batch
    return Gradients(dq, dk, dv, dbias, dslopes)


def _of_keys(
    block: Block, given: Operands, rows: list[jax.Array], final: bool, target: Target
) -> tuple[jax.Array, jax.Array]:
    schedule = schedules.backward_keys(given.facts, block.q.dtype.itemsize, block.rule.bwd_params, target)
    table = tables.table(given, block, schedule.q_tile, schedule.kv_tile, by_keys=True)
    dk, dv = launch(
        backward_keys,
        [*given.tiled(schedule.kv_tile), table.bounds, table.tiles, *rows],
        [jax.ShapeDtypeStruct(x.shape, x.dtype if final else jnp.float32) for x in (block.k, block.v)],
        grid=(table.visits.rows * block.kv.shape[-4] * block.kv.shape[-2],),
        name="ringattn_backward_keys",
        V=table.visits,
        **_constants(given.facts, schedule),
    )
    return dk, dv


def _of_queries(
    block: Block, given: Operands, rows: list[jax.Array], before: jax.Array | None, target: Target
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The gradient of the queries, of each query's part in the slope of its head, and of the bias."""
    schedule = schedules.backward_queries(given.facts, block.q.dtype.itemsize, block.rule.bwd_params, target)
    tiles = schedule.q_tile, schedule.kv_tile
    table = tables.table(given, block, *tiles)
    bias = None if block.bias_fixed else block.bias
    strips = bias_gradient.strips(block, table.visits.rows, table.visits.columns, bias is not None)
    ds = (1,) if bias is None else (*block.q.shape[::2], strips.rows, strips.columns, *tiles)
    by_row = (1,) if block.slopes is None else rows[1].shape
    outputs = [
        jax.ShapeDtypeStruct(block.q.shape, block.q.dtype if before is None else jnp.float32),
        jax.ShapeDtypeStruct(by_row, jnp.float32),
        jax.ShapeDtypeStruct(ds, block.q.dtype),
    ]

    def of_strip(first: jax.Array | None, before_it: jax.Array | None) -> tuple[jax.Array, ...]:
        arrays = [*given.tiled(schedule.kv_tile), table.bounds, table.tiles, *rows, first, before_it]
        return launch(
            backward_queries,
            arrays,
            outputs,
            grid=(strips.rows * block.q.shape[0] * block.q.shape[2],),
            aliases={} if before_it is None else {len(arrays) - 1: 0},
            name="ringattn_backward_queries",
            V=table.visits,
            S=strips,
            FRESH=before is None,
            HELD=schedule.held,
            KEPT=first is not None,
            **_constants(given.facts, schedule),
        )

    if bias is None:
        dq, dslopes, _ = of_strip(None, before)
        return dq, None if block.slopes is None else dslopes, None
    some = tables.seen(given, block, *tiles).some
    dq, dbias, dslopes = before, None, []
    for start in range(0, table.visits.rows, strips.rows):
        first = bias_gradient.first(start, dbias)
        dq, by_row, kept = of_strip(first, dq)
        dslopes.append(by_row[..., start * tiles[0] : (start + strips.rows) * tiles[0]])
        dbias = bias_gradient.summed(block, kept, some, first, dbias, strips, tiles, before is None)
    assert dq is not None and dbias is not None
    dbias = dbias.astype(bias.dtype) if before is None else dbias
    return dq, None if block.slopes is None else jnp.concatenate(dslopes, -1), dbias


def _constants(facts: Facts, schedule: Schedule) -> dict:
    return {
        "F": facts,
        "Q_TILE": schedule.q_tile,
        "KV_TILE": schedule.kv_tile,
        "DIM": operands.padded_dim(facts.head_dim),
        "VALUE_DIM": operands.padded_dim(facts.value_dim),
        "warps": schedule.warps,
        "stages": schedule.stages,
    }
