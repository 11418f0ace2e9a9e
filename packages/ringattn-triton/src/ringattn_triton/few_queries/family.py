# SPDX-License-Identifier: Apache-2.0
"""The family of kernels for few queries and many keys: which blocks it takes, and the launch of its forward pass."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from ringattn_core.contract.merge import merged, merged_over
from ringattn_core.contract.protocol import Block, Gradients, Partial

from .. import kernel_inputs
from ..kernel_inputs import BlockConstants
from ..launch import launch
from ..launch.target import Target
from ..portable import schedules
from ..visited_tiles import TableShape
from .forward_kernel import forward as forward_kernel

MOST_ROWS: Final = 64
"""The most rows of a tile of queries, with a row for each query in each head of a group: a block with more rows is none
of few queries."""
LEAST_TILES: Final = 4
"""The fewest key tiles for which the family takes a block."""
PROGRAMS: Final = 264
"""How many programs occupy a device: two for each multiprocessor of the largest Hopper GPU."""
AT_ONCE: Final = 1024
"""At how many key tiles a program looks at a time to find the first and the last that it visits."""


def why_not_forward(block: Block, target: Target) -> str | None:
    constants = kernel_inputs.of_block(block, fast=target.kind == "cuda").constants
    if constants.dropout or constants.bias or constants.masks or constants.segments or constants.max_logits:
        return "the kernel for few queries takes no dropout, bias, mask or segment ids, and returns no largest scores"
    if constants.q_length * constants.group > MOST_ROWS:
        return "the block has many queries"
    schedule = schedules.few_queries(constants, block.q.dtype.itemsize, block.rule.fwd_params, target)
    return "the block has few keys" if constants.kv_length < LEAST_TILES * schedule.kv_tile else None


def why_not_backward(block: Block, target: Target) -> str:
    return "the family has no backward kernel"


def forward(block: Block, partial: Partial | None, target: Target) -> Partial:
    """Continues the online softmax from `partial` (`None`: from nothing) with a block that the kernel takes."""
    inputs = kernel_inputs.of_block(block, fast=target.kind == "cuda")
    constants = inputs.constants
    schedule = schedules.few_queries(constants, block.q.dtype.itemsize, block.rule.fwd_params, target)
    batch, length, heads, _ = block.q.shape
    columns = -(-constants.kv_length // schedule.kv_tile)
    splits = _splits(batch * constants.kv_heads, columns)
    alone = splits == 1 and partial is None and block.final
    out = jax.ShapeDtypeStruct((batch * splits, length, heads, block.value_dim), block.q.dtype if alone else jnp.float32)
    found = launch(
        forward_kernel,
        inputs.in_tiles(schedule.q_tile, schedule.kv_tile),
        [out, jax.ShapeDtypeStruct((batch * splits, heads, length), jnp.float32)],
        grid=(batch * splits * constants.kv_heads,),
        warps=schedule.warps,
        stages=schedule.stages,
        name="ringattn_few_queries",
        F=constants,
        T=TableShape(listed=False, run=True, rows=1, columns=columns, grouped=False, together=1),
        SPLITS=splits,
        SORTED=block.rule.increasing and not block.padded,
        Q_TILE=schedule.q_tile,
        KV_TILE=schedule.kv_tile,
        DIM=kernel_inputs.padded_dim(constants.head_dim),
        VALUE_DIM=kernel_inputs.padded_dim(constants.value_dim),
        AT_ONCE=min(AT_ONCE, kernel_inputs.power_of_two(columns)),
    )
    own = merged_over(Partial(*found), (), splits)
    return own if partial is None else merged([partial, own])


def _splits(programs: int, columns: int) -> int:
    """Into how many parts the keys of a head are cut: the least power of two with which `programs` occupy the device.

    Every part has at least one of the `columns` key tiles.
    """
    splits = 1
    while programs * splits < PROGRAMS and 2 * splits <= columns:
        splits *= 2
    return splits
