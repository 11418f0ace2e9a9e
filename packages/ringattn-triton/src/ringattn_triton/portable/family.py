# SPDX-License-Identifier: Apache-2.0
"""The family of kernels that runs on any GPU and takes every block; also launches its forward pass."""

from typing import Any

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
    schedule = schedules.forward(block, constants, target)
    q_tile, heads = schedule.q_tile // schedule.sharing, block.q.shape[2] // schedule.sharing
    table = visited_tiles.table(block, q_tile, schedule.kv_tile, heads=heads)
    before = before_of(block, partial)
    arrays = [*inputs.in_tiles(q_tile, schedule.kv_tile), table.bounds, table.tiles, *before]
    found = launch(
        forward_kernel,
        arrays,
        results(block),
        grid=(table.shape.rows * block.q.shape[0] * heads,),
        aliases={len(arrays) - len(before) + i: i for i, x in enumerate(before) if x is not None},
        name="ringattn_forward",
        T=table.shape,
        FRESH=partial is None or partial.out is None,
        FROM_LSE=partial is not None,
        SHARING=schedule.sharing,
        **schedules.launch_options(constants, schedule),
        **unused(block),
    )
    return Partial(*found)


def before_of(block: Block, partial: Partial | None) -> list[jax.Array | None]:
    """The operands for the partial result that a forward kernel continues: one for each of `results`, or `None`.

    Sinks have all but an output.
    """
    given: list[Any] = [None] * 3 if partial is None else [partial.out, partial.lse, partial.max_logits]
    return given[: len(results(block))]


def unused(block: Block) -> dict[str, Any]:
    """The pointer parameters that a forward kernel does not use, as `None`: those of `max_logits` unless asked for."""
    return {} if block.rule.return_max_logits else {"MAX_BEFORE": None, "MAX": None}


def results(block: Block) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a forward kernel's outputs: `out`, `lse` and, if asked for, `max_logits`."""
    batch, length, heads, _ = block.q.shape
    out = jax.ShapeDtypeStruct((batch, length, heads, block.value_dim), block.q.dtype if block.final else jnp.float32)
    of_rows = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    return [out, of_rows, of_rows] if block.rule.return_max_logits else [out, of_rows]
