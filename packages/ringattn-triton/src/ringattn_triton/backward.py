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

from . import operands, schedules, tables
from .kernels.backward_bias import backward_bias
from .kernels.backward_keys import backward_keys
from .kernels.backward_queries import backward_queries
from .launch import launch
from .operands import Facts, Operands
from .schedules import Schedule, Target

_PACKED: Final = 64
"""Up to which head size keys and values are read packed: the largest tiles then leave no registers for two places."""


@dataclasses.dataclass(frozen=True)
class BiasSums:
    """How the gradient of the bias is cut into programs, and over what each of them sums.

    There are `rows` by `columns` tiles of scores in each of `grouped` batch rows or in all alike. A program sums over
    `batch_sums` batch rows, `head_sums` heads and `row_sums` tiles of queries; `own_rows` tiles of queries and `heads`
    heads have programs of their own. `summed_rows` says that the bias has one row for all queries.
    """

    rows: int
    columns: int
    grouped: bool
    heads: int
    own_rows: int
    batch_sums: int
    head_sums: int
    row_sums: int
    summed_rows: bool


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
    dk, dv = _of_keys(block, given, rows, dq is None, target)
    before = dq
    dq, dslopes = _of_queries(block, given, rows, before, target)
    dbias = None if block.bias is None else _of_bias(block, given, rows, before is None, target)
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
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of the queries, and of each query's part in the slope of its head."""
    schedule = schedules.backward_queries(given.facts, block.q.dtype.itemsize, block.rule.bwd_params, target)
    table = tables.table(given, block, schedule.q_tile, schedule.kv_tile)
    arrays = [*given.tiled(schedule.kv_tile), table.bounds, table.tiles, *rows, before]
    by_row = rows[1].shape if block.slopes is not None else (1,)
    dtype = block.q.dtype if before is None else jnp.float32
    dq, dslopes = launch(
        backward_queries,
        arrays,
        [jax.ShapeDtypeStruct(block.q.shape, dtype), jax.ShapeDtypeStruct(by_row, jnp.float32)],
        grid=(table.visits.rows * block.q.shape[0] * block.q.shape[2],),
        aliases={} if before is None else {len(arrays) - 1: 0},
        name="ringattn_backward_queries",
        V=table.visits,
        FRESH=before is None,
        HELD=schedule.held,
        **_constants(given.facts, schedule),
    )
    return dq, dslopes if block.slopes is not None else None


def _of_bias(block: Block, given: Operands, rows: list[jax.Array], final: bool, target: Target) -> jax.Array:
    assert block.bias is not None
    schedule = schedules.backward_bias(given.facts, block.q.dtype.itemsize, block.rule.bwd_params, target)
    q_tile, kv_tile = schedule.q_tile, schedule.kv_tile
    counts = -(-block.q_length // q_tile), -(-block.kv_length // kv_tile)
    seen = tables.seen(given, block, q_tile, kv_tile).some.astype(jnp.int8)
    batch, heads, length, _ = block.bias.shape
    summed_rows = length == 1
    sums = BiasSums(
        rows=counts[0],
        columns=counts[1],
        grouped=seen.shape[0] > 1,
        heads=heads,
        own_rows=1 if summed_rows else counts[0],
        batch_sums=block.q.shape[0] // batch,
        head_sums=block.q.shape[2] // heads,
        row_sums=counts[0] if summed_rows else 1,
        summed_rows=summed_rows,
    )
    (dbias,) = launch(
        backward_bias,
        [*given.tiled(kv_tile), seen, *rows],
        [jax.ShapeDtypeStruct(block.bias.shape, block.bias.dtype if final else jnp.float32)],
        grid=(batch * heads * sums.own_rows * sums.columns,),
        name="ringattn_backward_bias",
        D=sums,
        **_constants(given.facts, schedule),
    )
    return dbias


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
