# SPDX-License-Identifier: Apache-2.0
"""The family of kernels that runs on any GPU and takes every block; also launches its forward pass."""

import jax
import jax.numpy as jnp
from ringattn_core.contract.protocol import Block, Partial

from .. import kernel_inputs, visited_tiles
from ..launch import launch
from ..launch.target import Target
from . import schedules
from .backward import backward as backward
from .forward_kernel import forward as forward_kernel


def why_not_forward(block: Block, target: Target) -> None:
    return None


def why_not_backward(block: Block, target: Target) -> None:
    return None


def forward(block: Block, partial: Partial | None, target: Target) -> Partial:
    """Continues the online softmax from `partial` (`None`: from nothing) with the keys of `block`."""
    inputs = kernel_inputs.of_block(block, fast=target.kind == "cuda")
    constants = inputs.constants
    schedule = schedules.forward(constants, block.q.dtype.itemsize, block.rule.fwd_params, target)
    q_tile, heads = schedule.q_tile // schedule.together, block.q.shape[2] // schedule.together
    table = visited_tiles.table(inputs, block, q_tile, schedule.kv_tile, heads=heads)
    before = [None] * 2 if partial is None else [partial.out, partial.lse]
    arrays = [*inputs.in_tiles(q_tile, schedule.kv_tile), table.bounds, table.tiles, *before]
    out, lse = launch(
        forward_kernel,
        arrays,
        results(block),
        grid=(table.shape.rows * block.q.shape[0] * heads,),
        aliases={len(arrays) - 2 + i: i for i, x in enumerate(before) if x is not None},
        name="ringattn_forward",
        T=table.shape,
        FRESH=partial is None,
        TOGETHER=schedule.together,
        **schedules.launch_options(constants, schedule),
    )
    return Partial(out, lse)


def results(block: Block) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a forward kernel's outputs, `out` and `lse`."""
    batch, length, heads, _ = block.q.shape
    return [
        jax.ShapeDtypeStruct((batch, length, heads, block.value_dim), block.q.dtype if block.final else jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
    ]
