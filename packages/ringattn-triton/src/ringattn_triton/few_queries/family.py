# SPDX-License-Identifier: Apache-2.0
"""The family of kernels for few queries and many keys: which blocks it takes, and the launch of its forward pass."""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from ringattn_core.contract.merge import merged
from ringattn_core.contract.protocol import Block, Partial

from .. import kernel_inputs
from ..kernel_inputs import BlockConstants
from ..launch import launch
from ..launch.target import Target
from ..portable import schedules
from ..portable.backward import backward as backward  # `block_kernel.Family` has one; nothing calls this one
from ..visited_tiles import TableShape
from .forward_kernel import forward as forward_kernel
from .forward_kernel import merge as merge_kernel

MOST_ROWS: Final = 64
"""The most rows of a block of few queries, which has a row for each query in each head of a group."""
LEAST_TILES: Final = 4
"""The fewest key tiles for which the family takes a block."""
MULTIPROCESSORS: Final = 132
"""How many the largest Hopper GPU has; a program occupies one of them."""
LEAST_PART: Final = 2
"""The fewest key tiles of a part of the keys."""


def why_not_forward(block: Block, target: Target) -> str | None:
    constants = kernel_inputs.of_block(block, fast=target.kind == "cuda").constants
    if constants.dropout or constants.bias or constants.masks or constants.segments or constants.max_logits:
        return "the kernel for few queries takes no dropout, bias, mask or segment ids, and returns no largest scores"
    if constants.q_length * constants.group > MOST_ROWS:
        return "the block has many queries"
    schedule = _schedule(block, constants, target)
    return "the block has few keys" if constants.kv_length < LEAST_TILES * schedule.kv_tile else None


def why_not_backward(block: Block, target: Target) -> str:
    return "the family has no backward kernel"


def forward(block: Block, partial: Partial | None, target: Target) -> Partial:
    """Continues the online softmax from `partial` (`None`: from nothing) with a block that the kernel takes."""
    inputs = kernel_inputs.of_block(block, fast=target.kind == "cuda")
    constants = inputs.constants
    schedule = _schedule(block, constants, target)
    batch, heads = block.q.shape[0], constants.kv_heads
    columns = -(-constants.kv_length // schedule.kv_tile)
    rows = -(-constants.q_length * constants.group // schedule.q_tile)
    splits = _splits(batch * heads * rows, min(columns, -(-block.reach.span // schedule.kv_tile) + 1))
    value_dim = kernel_inputs.padded_dim(constants.value_dim)
    # Sinks have no output. Whatever has one is merged with the result.
    sinks, earlier = (partial, None) if partial is None or partial.out is None else (None, partial)
    narrow = block.final and earlier is None
    found = launch(
        forward_kernel,
        [*inputs.in_tiles(schedule.q_tile, schedule.kv_tile), None if sinks is None else sinks.lse],
        _results(block, batch * splits, narrow and splits == 1),
        grid=(batch * rows * splits * heads,),
        warps=schedule.warps,
        stages=schedule.stages,
        name="ringattn_few_queries",
        F=constants,
        T=TableShape(listed=False, run=True, rows=rows, columns=columns, grouped=False, heads_at_once=1),
        FROM_LSE=sinks is not None,
        SPLITS=splits,
        SORTED=block.monotone and not block.padded,
        Q_TILE=schedule.q_tile,
        KV_TILE=schedule.kv_tile,
        DIM=kernel_inputs.padded_dim(constants.head_dim),
        VALUE_DIM=value_dim,
    )
    if splits > 1:
        found = launch(
            merge_kernel,
            found,
            _results(block, batch, narrow),
            grid=(batch * constants.q_length * constants.heads,),
            name="ringattn_few_queries_merge",
            F=constants,
            SPLITS=splits,
            PLACES=kernel_inputs.power_of_two(splits),
            VALUE_DIM=value_dim,
        )
    return Partial(*found) if earlier is None else merged([earlier, Partial(*found)])


def _schedule(block: Block, constants: BlockConstants, target: Target) -> schedules.Schedule:
    """The schedule of `forward`; its tiles of queries have a row for each query in each head of a group.

    What bounds the kernel on a Hopper GPU is how many bytes are on their way from memory: some 100 KiB for each
    multiprocessor give 4.4 TB/s on an H200. If there are many programs, several small ones for each multiprocessor
    begin and end at different times.
    """
    rows, dim, default = kernel_inputs.padded_dim(constants.q_length * constants.group), constants.largest_dim, None
    if target == Target("cuda", 90) and block.q.dtype.itemsize == 2:
        many = len(block.q) * constants.kv_heads >= 3 * MULTIPROCESSORS and rows == 16 and dim <= 128
        default = schedules.Schedule(rows, 128 if dim <= 128 else 64, 4, 4 if dim <= 64 else 3)
        default = schedules.Schedule(rows, 32, 1, 4) if many else default
    schedule = schedules.forward(block, constants, target, default)
    # Larger tiles would not fit in registers.
    return dataclasses.replace(schedule, q_tile=min(rows, 64 if dim <= 128 and block.q.dtype.itemsize == 2 else 32))


def _results(block: Block, batch: int, narrow: bool) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of `out` and `lse` for so many batch rows; `narrow`: `out` has the dtype of the queries."""
    _, length, heads, _ = block.q.shape
    out = jax.ShapeDtypeStruct((batch, length, heads, block.value_dim), block.q.dtype if narrow else jnp.float32)
    return [out, jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]


def _splits(programs: int, tiles: int) -> int:
    """Into how many parts the keys of a head are cut, where a launch without parts has so many `programs`.

    All parts run at the same time: 80 multiprocessors suffice to occupy the memory, and parts that run one after
    another lose more time at their beginnings and ends. Each has `LEAST_PART` or more of the `tiles` of keys that
    queries see.
    """
    return max(1, min(MULTIPROCESSORS // programs, tiles // LEAST_PART))
