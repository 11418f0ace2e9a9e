# SPDX-License-Identifier: Apache-2.0
# pyright: standard, reportUndefinedVariable=false, reportInvalidTypeForm=false
"""The backward pass in one kernel for Hopper: which blocks the kernel takes, and how it is launched."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int32, Shaped
from ringattn_core import BwdParams
from ringattn_core.contract.protocol import Block, Gradients

from .. import kernel_inputs, visited_tiles
from ..kernel_inputs import LOG2_E, BlockConstants, KernelInputs
from ..launch import launch
from ..launch.target import Target
from ..portable import bias_gradient
from . import plans, turn_order
from .plans import BackwardPlan

TARGET: Final = Target("cuda", 90)
"""The only device for which the kernels of this family are made."""
_TURNS_IN_STRIP: Final = 4
"""How many turns (key tiles) each program takes in a launch for a strip, if every query head has its own key head."""


def why_not(block: Block, constants: BlockConstants) -> str | None:
    """Why the one-pass kernel does not take the block, or `None` if it does."""
    plan = plans.backward(constants)
    if plan is None:
        return "the one-pass backward kernel has no heads of these sizes"
    if block.rule.bwd_params != BwdParams():
        return "the caller fixes the schedule"
    if constants.bias and constants.padded_head_dim != 128:
        return "the one-pass backward kernel takes a bias only with heads of 72 to 128"
    if constants.bias and (reason := plans.why_not_bias(block, constants, "one-pass backward")):
        return reason
    # In float16 `narrowed` multiplies ds by the scale, so its sum is not dbias.
    if constants.bias and block.q.dtype == jnp.float16 and not block.bias_fixed:
        return "the one-pass backward kernel has no gradient of a bias in float16"
    if constants.capped and constants.slopes:
        return f"the one-pass backward kernel does not combine {constants.options}"
    if constants.masks and constants.grain % 16 and 16 % constants.grain:
        # The bits of 16 keys, from a multiple of 16 on, must lie in one word, or be one bit.
        return f"the one-pass backward kernel takes no chosen blocks of {constants.grain} keys"
    if plan.wide and (constants.capped or constants.by_head):
        return "the one-pass backward kernel has no options for heads of more than 128"
    if not block.rule.fused_backward and not turn_order.enough_heads(block, constants, plan):
        return "the caller wants the same bits at every run, and turns of so few heads would wait for each other"
    return None


def backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"] | None,
    target: Target = TARGET,
) -> Gradients:
    """The gradients of a block that the kernel takes. The dq that it returns includes `dq` (`None`: zero).

    Every run gives the same bits unless `rule.fused_backward` is set; see `turn_order.arranged`. `target` can only be
    `TARGET`.
    """
    from .dq_order import finish_dq

    inputs = kernel_inputs.of_block(block, fast=True)
    constants = inputs.constants
    batch, length, heads, dim = block.q.shape
    plan, turns_at_once, heads_to_choose = _plan(block, constants)
    q_tiles, squares = -(-length // plan.q_tile), plan.squares(dim)
    table = visited_tiles.table(
        block, plan.q_tile, plan.kv_tile, by_keys=True, rows_at_once=turns_at_once, heads=heads_to_choose,
        ranked=plan.ordered, counters=1 + (batch * heads * q_tiles if plan.ordered else 0),
    )  # fmt: skip
    counters = table.counters
    # If turns add in order, the first turn of a tile of dq overwrites the tile, and the others add to it.
    zeros = None if plan.ordered else jnp.zeros((batch * heads * q_tiles * squares * plans.SQUARE.value,), jnp.float32)
    arrays = [
        *inputs.in_tiles(plan.q_tile, plan.kv_tile), table.bounds, table.tiles, dout.astype(block.q.dtype),
        *_values_of_queries(block, lse, delta, constants, plan), table.ranks,
    ]  # fmt: skip
    before: list[jax.Array | None] = [counters, zeros, None, None]
    dbias = dheads = None
    if block.bias is None or block.bias_fixed:
        dk, dv, dheads, counters, sums = _launch_kernel(block, inputs, table, plan, arrays, before, None)
    else:
        strips = _strips(block, table.shape)
        seen = jnp.swapaxes(visited_tiles.seen(block, plan.q_tile, plan.kv_tile).some[:, 0], 1, 2).astype(jnp.int8)
        plan = dataclasses.replace(plan, strip_rows=strips.rows)
        for start in range(0, table.shape.rows, strips.rows):
            first = bias_gradient.first_tile(start, dbias)
            dk, dv, ds, counters, sums = _launch_kernel(block, inputs, table, plan, arrays, before, first)
            before = [counters.at[0].set(0), sums, dk, dv]
            dbias = bias_gradient.summed(block, ds, seen, first, dbias, strips, (plan.q_tile, plan.kv_tile), True)
        counters, sums, dk, dv = before
        assert counters is not None and sums is not None and dk is not None and dv is not None
    dk, dv = (dk[0], dk[1]) if constants.stacked else (dk, dv)
    (dq,) = launch(
        finish_dq,
        [sums, counters, dq],
        [jax.ShapeDtypeStruct(block.q.shape, block.q.dtype if block.final else jnp.float32)],
        grid=(batch * heads * q_tiles * squares,),
        aliases={2: 0} if dq is not None and not block.final else {},
        name="ringattn_hopper_finish_dq",
        F=constants,
        PLAN=plan,
        SCALE=1.0 if block.q.dtype == jnp.float16 else constants.scale,  # `narrowed` has put the scale into ds
        FRESH=dq is None,
    )
    return Gradients.of(block, dq, dk, dv, dbias, None if dheads is None else -dheads)


def _plan(block: Block, constants: BlockConstants) -> turn_order.Arranged:
    """The plan for a block that the kernel takes, but for `strip_rows`, and how its turns are arranged."""
    plan = plans.backward(constants)
    assert plan is not None
    plan, *others = turn_order.arranged(plan, block, constants)
    # Only where lse and delta are subtracted from the products themselves: not with a bias, ALiBi, a soft cap or
    # dropout. lse is divided by `unbend`, and float16 does not hold the quotient. Wide heads are bound by the cache.
    of_products = constants.only_masks and 1e-30 < constants.unbend < 1e30
    ragged = constants.q_length % plan.q_tile != 0 or constants.kv_length % plan.kv_tile != 0
    kinds = {"offset": constants.slopes, "low": constants.below, "high": constants.above, "segment": constants.segments}
    plan = dataclasses.replace(
        plan,
        masked=constants.masked or ragged,
        query_kinds=tuple(kind for kind, needed in kinds.items() if needed),
        subtracting=of_products and not plan.wide and block.q.dtype == jnp.bfloat16,
        results_by_tma=block.final and not plan.wide,
    )
    return turn_order.Arranged(plan, *others)


def _strips(block: Block, tiles: visited_tiles.TableShape) -> bias_gradient.Strips:
    """The size of strips of key tiles; the ds of one strip at a time is in memory.

    A strip has at most four turns for each program, or more where there would be over `MOST_STRIPS` strips. With four,
    the time until the last program ends is short beside the whole. With groups of heads there are fewer turns, because
    ds of each query head takes memory.
    """
    batch, _, heads, _ = block.q.shape
    turns = max(_TURNS_IN_STRIP * block.kv_heads // heads, 1) * plans.PROGRAMS
    # Rounded down: a program that takes one turn more than the others keeps them waiting.
    rows = max(turns // (batch * block.kv_heads), -(-tiles.rows // bias_gradient.MOST_STRIPS), 1)
    return bias_gradient.Strips(min(rows, tiles.rows), tiles.heads_at_once, heads, tiles.columns)


def _launch_kernel(
    block: Block,
    inputs: KernelInputs,
    table: visited_tiles.Table,
    plan: BackwardPlan,
    arrays: Sequence[jax.Array | None],
    before: Sequence[jax.Array | None],
    first: Int32[Array, " 1"] | None,
) -> tuple[jax.Array, ...]:
    """Launches the kernel for all key tiles, or, if `first` is given, for the strip that begins at key tile `first`.

    Returns five arrays: dk; dv; parts of the ALiBi slopes' gradient, or in a launch for a strip the strip's ds; the
    counters; the sums of dq. It updates the arrays in `before` in place: counters, sums of dq and, for strips, dk and
    dv.
    """
    from .backward_kernel import backward as kernel

    constants = inputs.constants
    batch, _, heads, dim = block.q.shape
    rows, columns = table.shape.rows, table.shape.columns
    if plan.strip_rows:
        tiles_of_ds = batch, heads, plan.strip_rows, columns, plan.kv_tile, plan.q_tile
        option = jax.ShapeDtypeStruct(tiles_of_ds, block.q.dtype)
    else:
        # Each consumer writes its part of the slope's gradient for each turn and head, in two numbers if there are
        # masked steps.
        parts = (batch, heads, (1 + plan.masked) * rows * 2) if constants.slopes else (1,)
        option = jax.ShapeDtypeStruct(parts, jnp.float32)
    counters, *_ = before
    assert counters is not None
    outputs = 3, 4, 0, 1  # the output that each array of `before` becomes
    return launch(
        kernel,
        [*arrays, *before, first],
        [
            *inputs.key_gradients(block.q.dtype if block.final else jnp.dtype(jnp.float32)),
            option,
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
            jax.ShapeDtypeStruct((batch * heads * columns * plan.squares(dim) * plans.SQUARE.value,), jnp.float32),
        ],
        grid=(min(plans.PROGRAMS, (plan.strip_rows or rows) * batch * block.kv_heads),),
        registers=plan.registers_at_start,
        aliases={len(arrays) + i: outputs[i] for i, x in enumerate(before) if x is not None},
        name="ringattn_hopper_backward",
        F=constants,
        T=table.shape,
        BATCH=batch,
        PLAN=plan,
    )


def _values_of_queries(
    block: Block,
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    constants: BlockConstants,
    plan: BackwardPlan,
) -> tuple[Shaped[Array, "2 B N *rows"], Float32[Array, "b n kinds rows"] | None]:
    """Arrays padded to whole query tiles: `lse` in units of log2 and `-delta`; the values of `plan.query_kinds`.

    If `plan.subtracting`, the first are `-lse / unbend` and `-delta`, in parts (`_in_parts`). They are one array, which
    XLA computes in one kernel. Values of the second are float32, or int32 bitcast to float32; `None`: there are none.
    """
    more = (0, -block.q_length % plan.q_tile)
    # A row that sees nothing, or lies past the end, gets lse +inf (-inf if it is negated), so that its p is 0.
    unit, unseen = (-1 / constants.unbend, -jnp.inf) if plan.subtracting else (LOG2_E, jnp.inf)
    lse = jnp.where(lse == -jnp.inf, unseen, lse * unit)
    lse = jnp.pad(lse, [(0, 0), (0, 0), more], constant_values=unseen)
    delta = jnp.pad(-delta, [(0, 0), (0, 0), more])
    # Without the barrier, XLA computes Σ dout * out in the kernel that stacks, where each thread reads a whole row.
    # `benchmarks/launches.py "Gemma-3 1B, window 512"` then lists no `input_reduce_fusion`.
    rows = jnp.stack([lse, jax.lax.optimization_barrier(delta)])
    others = list(_query_values(block, plan.q_tile, more).values())
    return _in_parts(rows) if plan.subtracting else rows, jnp.stack(
        jnp.broadcast_arrays(*others), 2
    ) if others else None


def _query_values(block: Block, q_tile: int, more: tuple[int, int]) -> dict[str, Any]:
    """The values of each of the plan's `query_kinds` that the block has, padded by `more` queries."""
    found: dict[str, Any] = {}
    if block.slopes is not None:
        position = jnp.pad(block.q_positions, [(0, 0), more], mode="edge")[:, None]
        tiles = position.reshape(len(position), 1, -1, q_tile)
        found["offset"] = (tiles - tiles[..., :1]).astype(jnp.float32).reshape(position.shape)
    for kind, position in (("low", block.first), ("high", block.last)):
        if position is not None:
            position = jnp.pad(position, [(0, 0), (0, 0), more], mode="edge")
            found[kind] = jax.lax.bitcast_convert_type(position, jnp.float32)
    if block.q_segments is not None:
        # Negative segment ids mark padding, which must match no id: queries get -1, and keys -2.
        segment = jnp.pad(jnp.maximum(block.q_segments, -1), [(0, 0), more], constant_values=-1)[:, None]
        found["segment"] = jax.lax.bitcast_convert_type(segment, jnp.float32)
    return found


def _in_parts(x: Float32[Array, "2 B N rows"]) -> BFloat16[Array, "2 B N rows 8"]:
    """Splits each number into three bfloat16 numbers that add up to it, and five zeros: TMA needs strides of 16 bytes.

    The first part of an infinite number is infinite, and the others are 0.
    """
    parts = []
    for _ in range(3):
        # XLA may leave out a conversion to bfloat16 and back, but not `reduce_precision`.
        parts.append(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = jnp.where(jnp.isfinite(x), x - parts[-1], 0.0)
    return jnp.stack([*parts, *[jnp.zeros_like(x)] * 5], -1).astype(jnp.bfloat16)
