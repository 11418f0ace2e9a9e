# SPDX-License-Identifier: Apache-2.0
"""Which kernels give the gradients of a block, on what, and how their results come together."""

import dataclasses
import functools
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core.contract.protocol import Block, Gradients, Own
from ringattn_core.contract.varying import align, axes_of

from . import bias_gradient, operands, schedules, tables
from .kernels.backward_keys import backward_keys
from .kernels.backward_queries import backward_queries
from .launch import launch
from .operands import Facts, Operands
from .rows import Given, look
from .schedules import Schedule, Target

_PACKED: Final = 64
"""Up to which head size keys and values are read packed: the largest tiles then leave no registers for two places."""
MOST_BITS: Final = 2**30
"""Bytes of what survives dropout: beyond it is drawn twice, and memory stays linear in the lengths."""


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
    rows, own = _rows(block, dout, lse, delta)
    block = dataclasses.replace(block, q=rows.q, own=None if block.q.shape[-1] <= _PACKED else own)
    given = operands.of(block, fast=target.kind == "cuda").mended(block.own, poison=False)
    given = given.replaced(found=None if own is None else own.found)
    schedules.refuse_large_heads(given.facts)
    final, turned = dq is None, given.turned()
    itemsize, params = block.q.dtype.itemsize, block.rule.bwd_params
    by_keys = schedules.backward_keys(turned.facts, itemsize, params, target)
    by_queries = schedules.backward_queries(given.facts, itemsize, params, target)
    bits = _bits_to_keep(block, by_queries, by_keys)
    dq, dslopes, dbias, kept = _of_queries(block, given, rows, dq, by_queries, bits)
    dk, dv = _of_keys(block, turned, rows, None if bits is None else kept, by_keys, final)
    if block.slopes is not None and dslopes is not None:
        by_batch = dslopes.sum(2)
        dslopes = by_batch.sum(0, keepdims=True) if block.slopes.shape[0] == 1 else by_batch
    return Gradients(dq, dk, dv, dbias, dslopes)


def _rows(
    block: Block, dout: Float[Array, "B T N Hv"], lse: Float32[Array, "B N T"], delta: Float32[Array, "B N T"]
) -> tuple[Given, Own | None]:
    """The rows as kernels read them, and what there is as it came, with what a look at the rows found."""
    own = block.own
    if own is not None and own.rows is not None:
        given, found = look(own.rows, own.found)
        return given, own._replace(found=found)
    # A row that sees nothing has only scores of -inf: they weigh nothing beside any lse that is a number.
    finite = jnp.where(lse == -jnp.inf, 0.0, lse * operands.LOG2_E)
    return Given(block.q, dout.astype(block.q.dtype), finite, delta), own


def _of_keys(
    block: Block, given: Operands, rows: Given, kept: jax.Array | None, schedule: Schedule, final: bool
) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys and values. `kept` are the bits of what survives dropout, where it need not be drawn."""
    if kept is not None:
        given = given._replace(facts=dataclasses.replace(_with_bits(given.facts, kept), drawn=False))
    table = tables.table(given, block, schedule.q_tile, schedule.kv_tile, by_keys=True)
    dk, dv = launch(
        backward_keys,
        [*given.tiled(schedule.kv_tile), table.bounds, table.tiles, *rows.operands, kept],
        [jax.ShapeDtypeStruct(x.shape, x.dtype if final else jnp.float32) for x in (block.k, block.v)],
        grid=(table.visits.rows * block.kv.shape[-4] * block.kv.shape[-2],),
        name="ringattn_backward_keys",
        V=table.visits,
        HELD=schedule.held,
        MENDED=rows.mended is not None,
        **_constants(given.facts, schedule),
    )
    return dk, dv


def _bits_to_keep(block: Block, by_queries: Schedule, by_keys: Schedule) -> jax.ShapeDtypeStruct | None:
    """The bits of what survives dropout, as long as the tiles of both kernels, if they are kept.

    Not beside a gradient of the bias, whose strips would each write some of them.
    """
    batch, length, heads, _ = block.q.shape
    tiles = [(schedule.q_tile, schedule.kv_tile) for schedule in (by_queries, by_keys)]
    q_tile, kv_tile = (max(sizes) for sizes in zip(*tiles, strict=True))
    lines, rows = -(-block.kv_length // kv_tile) * kv_tile // 32, -(-length // q_tile) * q_tile
    bits = jax.ShapeDtypeStruct((batch, heads, lines, rows, 4), jnp.uint8)
    summed = block.bias is not None and not block.bias_fixed
    whole = all(size % 32 == 0 for _, size in tiles)
    return bits if block.rule.dropout and not summed and whole and bits.size <= MOST_BITS else None


def _with_bits(facts: Facts, bits: Any) -> Facts:
    """The same for kernels that write bits `[B, N, S / 32, T, 4]` of what survives dropout, or read them."""
    return dataclasses.replace(facts, kept_head=math.prod(bits.shape[2:]), kept_line=math.prod(bits.shape[3:]))


def _of_queries(
    block: Block,
    given: Operands,
    rows: Given,
    before: jax.Array | None,
    schedule: Schedule,
    bits: jax.ShapeDtypeStruct | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array]:
    """The gradient of the queries, of each query's part in the slope of its head, and of the bias; and the `bits`.

    The kernel of dk and dv reads what survives dropout in less time than it would draw it.
    """
    tiles = schedule.q_tile, schedule.kv_tile
    table = tables.table(given, block, *tiles)
    count = table.visits.rows, table.visits.columns
    bias = None if block.bias_fixed else block.bias
    strips = bias_gradient.strips(block, *count, bias is not None)
    heads = block.q.shape[::2]
    shape = (1,) if bias is None else (*heads, strips.rows, strips.columns, *tiles)
    facts = given.facts if bits is None else _with_bits(given.facts, bits)
    outputs = [
        jax.ShapeDtypeStruct(block.q.shape, block.q.dtype if before is None else jnp.float32),
        jax.ShapeDtypeStruct((1,) if block.slopes is None else rows.lse.shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, block.q.dtype),
        bits or jax.ShapeDtypeStruct((1,), jnp.uint8),
    ]

    inputs = [*given.tiled(schedule.kv_tile), table.bounds, table.tiles, *rows.operands]

    def of_strip(first: jax.Array | None, before_it: jax.Array | None) -> tuple[jax.Array, ...]:
        arrays = [*inputs, first, before_it]
        return launch(
            backward_queries,
            arrays,
            outputs,
            grid=(math.prod(heads) * strips.rows,),
            aliases={} if before_it is None else {len(arrays) - 1: 0},
            name="ringattn_backward_queries",
            V=table.visits,
            S=strips,
            FRESH=before is None,
            HELD=schedule.held,
            KEPT=first is not None,
            BITS_KEPT=bits is not None,
            MENDED=rows.mended is not None,
            **_constants(facts, schedule),
        )

    if bias is None:
        dq, dslopes, _, kept = of_strip(None, before)
        return dq, None if block.slopes is None else dslopes, None, kept
    seen = tables.seen(given, block, *tiles).some.astype(jnp.int8)
    dq, dbias, dslopes, kept = before, None, [], None
    for start in range(0, count[0], strips.rows):
        first = bias_gradient.first(start, dbias)
        dq, by_row, ds, kept = of_strip(first, dq)
        dslopes.append(by_row[..., start * tiles[0] : (start + strips.rows) * tiles[0]])
        dbias = bias_gradient.summed(block, ds, seen, first, dbias, strips, tiles, before is None)
    assert dq is not None and dbias is not None and kept is not None
    dbias = dbias.astype(bias.dtype) if before is None else dbias
    return dq, None if block.slopes is None else jnp.concatenate(dslopes, -1), dbias, kept


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
