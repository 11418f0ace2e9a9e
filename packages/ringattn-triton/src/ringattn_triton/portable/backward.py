# SPDX-License-Identifier: Apache-2.0
"""Backward pass for any GPU: a kernel that owns queries, one that owns keys, and the sums of the bias gradient.

Each of the two kernels computes the scores. In return, results are the same bits at every run, because no program adds
to what another one writes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core.contract.protocol import Block, Gradients

from .. import kernel_inputs, visited_tiles
from ..kernel_inputs import KernelInputs
from ..launch import launch
from ..launch.target import Target
from . import bias_gradient, schedules
from .backward_kernels import backward_keys, backward_queries

Rows = list[jax.Array]
"""The three arrays `dout`, `lse` and `delta`. Here `lse` is in units of log2, and 0 for a row that sees nothing."""


def backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"] | None,
    target: Target,
) -> Gradients:
    """The gradients of `block`. The dq that it returns includes `dq`, the sum over the blocks before (`None`: zero)."""
    inputs = kernel_inputs.of_block(block, fast=target.kind == "cuda")
    # `delta` belongs to `dout` before this: with TF32, a query that sees one key has gradients of rounding, not 0.
    dout = kernel_inputs.nearest_tf32(dout, block.rule)
    # All scores of a row that sees nothing are -inf: with a finite lse its probabilities are 0.
    rows = [dout, jnp.where(lse == -jnp.inf, 0.0, lse * kernel_inputs.LOG2_E), delta]
    dq, dheads, dbias = _of_queries(block, inputs, rows, dq, target)
    dk, dv = _of_keys(block, inputs.with_transposed_bias(), rows, target)
    return Gradients.of(block, dq, dk, dv, dbias, dheads)


def _of_keys(block: Block, inputs: KernelInputs, rows: Rows, target: Target) -> tuple[jax.Array, ...]:
    """Computes dk and dv by the kernel whose programs own key tiles."""
    schedule = schedules.backward_keys(block, inputs.constants, target)
    table = visited_tiles.table(block, schedule.q_tile, schedule.kv_tile, by_keys=True)
    dk, dv = launch(
        backward_keys,
        [*inputs.in_tiles(schedule.q_tile, schedule.kv_tile), table.bounds, table.tiles, *rows],
        inputs.key_gradients(_dtype(block, block.k)),
        grid=(table.shape.rows * block.q.shape[0] * block.kv_heads,),
        name="ringattn_backward_keys",
        T=table.shape,
        **schedules.launch_options(inputs.constants, schedule),
    )
    return (dk[0], dk[1]) if inputs.constants.stacked else (dk, dv)


def _of_queries(
    block: Block, inputs: KernelInputs, rows: Rows, before: jax.Array | None, target: Target
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Computes dq, each query's part of the gradient of its head's ALiBi slope, and the gradient of the bias.

    The kernel is the one whose programs own query tiles. The third result is `None` if the bias has no gradient.
    """
    schedule = schedules.backward_queries(block, inputs.constants, target)
    tiles = schedule.q_tile, schedule.kv_tile
    table = visited_tiles.table(block, *tiles)
    count = table.shape.rows, table.shape.columns
    bias = None if block.bias_fixed else block.bias
    strips = None if bias is None else bias_gradient.strips(block, *count)
    batch, length, heads, _ = block.q.shape
    outputs = [
        jax.ShapeDtypeStruct(block.q.shape, _dtype(block, block.q)),
        jax.ShapeDtypeStruct((batch, heads, length) if inputs.constants.slopes else (1,), jnp.float32),
        jax.ShapeDtypeStruct(
            (1,) if strips is None else (batch, heads, strips.rows, strips.columns, *tiles), block.q.dtype
        ),
    ]
    arrays = [*inputs.in_tiles(*tiles), table.bounds, table.tiles, *rows]

    def of_strip(first: jax.Array | None, so_far: jax.Array | None) -> tuple[jax.Array, ...]:
        return launch(
            backward_queries,
            [*arrays, first, so_far],
            outputs,
            grid=(batch * heads * (strips or table.shape).rows,),
            aliases={} if so_far is None else {len(arrays) + 1: 0},
            name="ringattn_backward_queries",
            T=table.shape,
            S=strips or table.shape,
            FRESH=before is None,
            IN_STRIPS=first is not None,
            **schedules.launch_options(inputs.constants, schedule),
        )

    if bias is None or strips is None:
        dq, dheads, _ = of_strip(None, before)
        return dq, dheads, None
    seen = visited_tiles.seen(block, *tiles).some[:, 0].astype(jnp.int8)
    dq, dbias, dheads = before, None, []
    for start in range(0, count[0], strips.rows):
        first = bias_gradient.first_tile(start, dbias)
        dq, by_row, ds = of_strip(first, dq)
        dheads.append(by_row[..., start * tiles[0] : (start + strips.rows) * tiles[0]])
        dbias = bias_gradient.summed(block, ds, seen, first, dbias, strips, tiles)
    assert dq is not None and dbias is not None
    return dq, jnp.concatenate(dheads, -1), dbias.astype(_dtype(block, bias))


def _dtype(block: Block, x: jax.Array) -> jnp.dtype:
    """The dtype of the gradient of `x`: that of `x` if the block is `final`, else float32."""
    return x.dtype if block.final else jnp.dtype(jnp.float32)
