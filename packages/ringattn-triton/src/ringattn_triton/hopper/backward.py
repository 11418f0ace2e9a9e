# SPDX-License-Identifier: Apache-2.0
"""The backward pass in one kernel for Hopper: which blocks the kernel takes, and how it is launched."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32
from ringattn_core import BwdParams
from ringattn_core.contract.protocol import Block, Gradients

from .. import kernel_inputs, visited_tiles
from ..kernel_inputs import LOG2_E, BlockConstants, KernelInputs, power_of_two
from ..launch import launch
from ..launch.target import Target
from ..portable import bias_gradient
from . import bias_tiles
from .backward_plan import BackwardPlan, plan_of
from .schedules import PROGRAMS

TARGET: Final = Target("cuda", 90)
"""The only device for which the kernels of this family are made."""
_TOGETHER: Final = 512
"""Where turns do not wait for each other, as few key heads run side by side as have this many turns (key tiles) in all:
their queries stay in the cache."""
_TOGETHER_IN_ORDER: Final = 16
"""The most key heads whose turns run side by side where turns wait for each other. With the value 64, a batch of 8
rows of 2k tokens takes 1.3 times as long as with 16, because the cache does not hold so many heads."""
_WIDE_TOGETHER_IN_ORDER: Final = 4
"""`_TOGETHER_IN_ORDER` for head sizes above 128. With the value 8, the kernel takes 1.1 times as long under a mask."""
_IN_CACHE: Final = 2**25
"""The most bytes of queries, dout and dq (in float32) that the cache holds, over all heads that run at once. Turns that
go upwards then take 0.93 to 0.98 of the time that they take downwards, with twice as many bytes 1.03."""
_ABREAST: Final = 16
"""The most neighbouring key tiles that begin together where `_abreast` allows it."""
_APART: Final = 16
"""The least number of steps by which a turn under a causal mask is shorter than the turn before it, for neighbouring
turns to begin together. With fewer steps the cache still holds most query tiles from one turn to the next."""
_FOLDED_APART: Final = 1.9
"""How many steps apart folded turns of a head begin, at least. With half as many they wait for each other: a call with
gradients and heads of 192 or 256 takes 1.04 to 1.1 times as long as without folding, not 0.95."""
_LONG: Final = 16
"""The least ratio of a turn's steps to the number of turns of its key head that run at once; each of these turns begins
1.5 steps after the one before."""
_WIDE_LONG: Final = 31
"""`_LONG` for head sizes above 128, where turns begin farther apart."""
_STEPS: Final = 8
"""The least ratio of a turn's steps to the number of turns of its head that would run at once if all heads ran side by
side. Below this ratio, turns wait too long for each other. At this ratio, under a causal mask, a simulation of the
waits gives 1.3 times the steps; two passes (one for dk and dv, one for dq) take 1.4 times as long."""
_WIDE_STEPS: Final = 2
"""`_STEPS` for head sizes above 128, where two passes take 2.2 times as long."""
_TURNS_IN_STRIP: Final = 4
"""How many turns (key tiles) each program takes in a launch for a strip, if every query head has its own key head."""
_REGISTERS_AT_START: Final = 168


def why_not(block: Block, constants: BlockConstants) -> str | None:
    """Why the one-pass kernel does not take the block, or `None` if it does."""
    plan = plan_of(constants)
    if plan is None:
        return "the one-pass backward kernel has no heads of these sizes"
    if block.rule.bwd_params != BwdParams():
        return "the caller fixes the schedule"
    if constants.bias and constants.padded_head_dim != 128:
        return "the one-pass backward kernel takes a bias only with heads of 72 to 128"
    if constants.bias and (reason := bias_tiles.why_not(block, constants, "one-pass backward")):
        return reason
    # In float16 `narrowed` multiplies ds by the scale, so its sum is not dbias.
    if constants.bias and block.q.dtype == jnp.float16 and not block.bias_fixed:
        return "the one-pass backward kernel has no gradient of a bias in float16"
    if constants.capped and constants.distances:
        return f"the one-pass backward kernel does not combine {constants.options}"
    if plan.wide and (constants.capped or constants.by_head):
        return "the one-pass backward kernel has no options for heads of more than 128"
    if not block.rule.fused_backward and not _enough_heads(block, constants, plan):
        return "the caller wants the same bits at every run, and turns of so few heads would wait for each other"
    return None


def _in_order(block: Block, constants: BlockConstants, plan: BackwardPlan) -> bool:
    """Whether turns add to dq in the order in which they are taken, so that every run gives the same bits.

    They do if the caller wants the same bits, or if it is faster. On an H100, an ordered kernel takes 0.83 of the time
    with 8 heads in a group, because turns share tiles in the cache. It takes 0.94 with 2k tokens and 0.92 with
    documents (segment ids), because dq needs no zeros, and 1.02 with 16k tokens.
    """
    faster = constants.group >= 8 or constants.q_length <= 2048 or constants.segments
    return not block.rule.fused_backward or (faster and not plan.wide and _enough_heads(block, constants, plan))


def _enough_heads(block: Block, constants: BlockConstants, plan: BackwardPlan) -> bool:
    """Whether enough heads run at once for turns to wait seldom. (A turn waits only for turns of the same head.)"""
    least = -(-(_WIDE_STEPS if plan.wide else _STEPS) * PROGRAMS // _steps_of_all(constants, plan))
    return len(block.q) * constants.kv_heads >= min(PROGRAMS, least)


def _heads_in_order(constants: BlockConstants, plan: BackwardPlan) -> int:
    """How many key heads have turns side by side where turns wait for each other.

    The turns of one head share query tiles in the cache while they are in step. Under a causal mask they stay in step
    if half of the turns run at once: each program then takes a long turn and a short one, and all begin the next heads
    together. With segment ids turns may be short, and short turns of few heads wait for each other, while one long
    document takes the same time with any number of heads: so as many run side by side as may. Turns of wide heads
    that see all keys get out of step, so no more heads run side by side than the cache holds, but enough for every
    program to have a turn. With 2 heads of 192, not 4 (8k tokens), the backward pass takes 0.81 of the time (H100).
    """
    most, long = (_WIDE_TOGETHER_IN_ORDER, _WIDE_LONG) if plan.wide else (_TOGETHER_IN_ORDER, _LONG)
    if constants.segments and not plan.wide:
        return most
    turns = -(-constants.kv_length // plan.kv_tile)
    if plan.wide and not (constants.above or constants.below or constants.segments or constants.masks):
        most = min(most, max(-(-PROGRAMS // turns), _IN_CACHE // _bytes_of_head(constants)))
    return min(most, max(2 * PROGRAMS // turns, long * PROGRAMS // _steps_of_all(constants, plan), 1))


def _heads_upwards(constants: BlockConstants, plan: BackwardPlan) -> int:
    """How many key heads run side by side if turns go upwards (`backward_turns.steps_of`); 0 if they must not.

    It is the least power of two that gives every program a turn. It is 0 if the cache does not hold the heads' queries,
    dout and dq (`_IN_CACHE`), for head sizes above 128, where it takes too long to add to dq, and with segment ids,
    where turns may be short.
    """
    heads = power_of_two(-(-PROGRAMS // -(-constants.kv_length // plan.kv_tile)))
    cached = heads * _bytes_of_head(constants) <= _IN_CACHE
    return 0 if plan.wide or constants.segments or not cached else heads


def _bytes_of_head(constants: BlockConstants) -> int:
    """How many bytes the queries, dout and dq (in float32) of a key head have."""
    return 8 * constants.group * constants.q_length * constants.padded_head_dim


def _heads_folded(constants: BlockConstants, plan: BackwardPlan) -> int:
    """How many key heads run side by side if turns are folded (`backward_turns.take_turn`); 0 if they must not be.

    Turns of a head then begin `heads * steps / PROGRAMS` steps apart, where `steps` is the number of steps of its first
    turn. It is the least power of two that makes this enough, and 0 if the cache does not hold so many heads. Heads up
    to 128 lose up to 5% if folded, because they hand tiles of dq over faster, and go upwards.
    """
    heads = power_of_two(math.ceil(_FOLDED_APART * PROGRAMS / _steps_of_all(constants, plan)))
    cached = heads * _bytes_of_head(constants) <= _IN_CACHE
    return heads if plan.wide and cached and _causal_alone(constants) else 0


def _abreast(constants: BlockConstants, plan: BackwardPlan) -> int:
    """How many turns of neighbouring key tiles of a head begin together (`backward_turns.take_turn`).

    Under a causal mask, turns that begin together end one after another, and the turns after them would begin as far
    apart. With many heads in a group that is so far that each turn reads its query tiles from memory. If the 32nd part
    of a head's turns begins together, a call with gradients takes 0.94 to 0.98 of the time (H200). If twice as many do,
    it takes up to 1.04 times as long, because the first of them waits for the last. Heads above 128 gain nothing.
    """
    apart = constants.group * plan.kv_tile // plan.q_tile
    gains = apart >= _APART and _causal_alone(constants) and not (plan.wide or constants.by_head)
    return min(max(constants.kv_length // plan.kv_tile // 32, 1), _ABREAST) if gains else 1


def _causal_alone(constants: BlockConstants) -> bool:
    """Whether the mask is causal and nothing else: each turn is shorter than the one before by the same steps."""
    return constants.above and not (constants.below or constants.segments or constants.masks)


def _heads_inside(block: Block, constants: BlockConstants) -> bool:
    """Whether an ordered turn visits a query tile for all heads of its group before the next tile.

    If not, it visits all tiles for a head, and then for the next head. Turns of one key head visit different numbers of
    tiles. With all tiles for a head first, they are soon at different heads, and share no tiles in the cache: with
    8 heads in a group the kernel takes 1.13 times as long. But under a sliding window, turns that run at once are at
    different tiles anyway, as far apart as their keys, and the cache does not hold these tiles for all heads: one head
    at a time, a call with gradients takes 0.73 to 1.02 of the time. Options that depend on the head are read once for
    each head, so that heads come one at a time there, too.
    """
    left, _ = block.rule.sliding_window or (None, None)
    return left is None and not constants.by_head


def _steps_of_all(constants: BlockConstants, plan: BackwardPlan) -> int:
    """The number of steps of a turn that sees all queries, over all query heads of its group."""
    return -(-constants.q_length // plan.q_tile) * constants.group


def backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"] | None,
    target: Target = TARGET,
) -> Gradients:
    """The gradients of a block that the kernel takes. The dq that it returns includes `dq` (`None`: zero).

    Every run gives the same bits unless `rule.fused_backward` is set; see `_in_order`.
    """
    from .dq_order import finish_dq

    inputs = kernel_inputs.of_block(block, fast=True)
    constants = inputs.constants
    batch, length, heads, dim = block.q.shape
    plan = plan_of(constants)
    assert plan is not None
    ordered = _in_order(block, constants, plan)
    bias = None if block.bias_fixed else block.bias
    turns, side_by_side = _TOGETHER, constants.kv_heads
    upwards = _heads_upwards(constants, plan) if ordered and bias is None else 0
    folded = _heads_folded(constants, plan) if ordered else 0
    if ordered:
        turns = (upwards or folded or _heads_in_order(constants, plan)) * -(-constants.kv_length // plan.kv_tile)
        side_by_side *= batch
    q_tiles = -(-length // plan.q_tile)
    count = 1 + (batch * heads * q_tiles if ordered else 0)
    table = visited_tiles.table(
        inputs, block, plan.q_tile, plan.kv_tile, True, turns, side_by_side, ranked=ordered, counters=count
    )
    masked = any((constants.below, constants.above, constants.segments, constants.padded, constants.masks))
    masked = masked or length % plan.q_tile != 0 or constants.kv_length % plan.kv_tile != 0
    compared = constants.below or constants.above
    kinds = ("distance", constants.distances), ("position", compared), ("segment", constants.segments)
    of_queries = tuple(kind for kind, needed in kinds if needed)
    plan = dataclasses.replace(
        plan,
        masked=masked,
        ordered=ordered,
        heads_inside=ordered and _heads_inside(block, constants),
        upwards=upwards > 0,
        folded=folded > 0,
        abreast=_abreast(constants, plan) if ordered and not upwards and bias is None else 1,
        of_queries=of_queries,
    )
    counters = table.counters
    pieces = plan.pieces(dim)
    # If turns add in order, the first turn of a tile of dq overwrites the tile, and the others add to it.
    zeros = None if ordered else jnp.zeros((batch * heads * q_tiles * pieces * 4096,), jnp.float32)
    arrays = [
        *inputs.in_tiles(plan.q_tile, plan.kv_tile), table.bounds, table.tiles, dout.astype(block.q.dtype),
        *_rows(block, lse, delta, plan), table.ranks,
    ]  # fmt: skip
    before: list[jax.Array | None] = [counters, zeros, None, None]
    dbias = dheads = None
    if bias is None:
        dk, dv, dheads, counters, sums = _launch_kernel(block, inputs, table, plan, arrays, before, None)
    else:
        strips = _strips(block, table.shape)
        seen = jnp.swapaxes(visited_tiles.seen(inputs, block, plan.q_tile, plan.kv_tile).some, 1, 2).astype(jnp.int8)
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
        grid=(batch * heads * q_tiles * pieces,),
        aliases={2: 0} if dq is not None and not block.final else {},
        name="ringattn_hopper_finish_dq",
        Q_LENGTH=length,
        HEADS=heads,
        DIM=dim,
        Q_TILES=q_tiles,
        SCALE=1.0 if block.q.dtype == jnp.float16 else constants.scale,  # `narrowed` has put the scale into ds
        FRESH=dq is None,
        Q_TILE=plan.q_tile,
        PIECES=pieces,
        ORDERED=ordered,
    )
    return Gradients.of(block, dq, dk, dv, dbias, None if dheads is None else -dheads)


def _strips(block: Block, tiles: visited_tiles.TableShape) -> bias_gradient.Strips:
    """The size of strips of key tiles; the ds of one strip at a time is in memory.

    A strip has at most four turns for each program, or more where there would be over `MOST_STRIPS` strips. With four,
    the time until the last program ends is short beside the whole. With groups of heads there are fewer turns, because
    ds of each query head takes memory.
    """
    batch, _, heads, _ = block.q.shape
    turns = max(_TURNS_IN_STRIP * block.kv_heads // heads, 1) * PROGRAMS
    # Rounded down: a program that takes one turn more than the others keeps them waiting.
    rows = max(turns // (batch * block.kv_heads), -(-tiles.rows // bias_gradient.MOST_STRIPS), 1)
    return bias_gradient.Strips(min(rows, tiles.rows), tiles.together, heads, tiles.columns)


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
        parts = (batch, heads, (1 + plan.masked) * rows * 2) if constants.per_head_gradient else (1,)
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
            jax.ShapeDtypeStruct((batch * heads * columns * plan.pieces(dim) * 4096,), jnp.float32),
        ],
        grid=(min(PROGRAMS, (plan.strip_rows or rows) * batch * block.kv_heads),),
        registers=_REGISTERS_AT_START,
        aliases={len(arrays) + i: outputs[i] for i, x in enumerate(before) if x is not None},
        name="ringattn_hopper_backward",
        F=constants,
        T=table.shape,
        BATCH=batch,
        PLAN=plan,
    )


def _rows(
    block: Block,
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    plan: BackwardPlan,
) -> tuple[Float32[Array, "B N rows"], Float32[Array, "B N rows"], Float32[Array, "b kinds rows"] | None]:
    """Arrays padded to whole query tiles: `lse` in units of log2, `-delta`, numbers of `plan.of_queries` or `None`."""
    more = (0, -block.q_length % plan.q_tile)
    # A row that sees nothing, or lies past the end, gets lse +inf, so that its probabilities are 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    lse = jnp.pad(lse, [(0, 0), (0, 0), more], constant_values=jnp.inf)
    delta = jnp.pad(-delta, [(0, 0), (0, 0), more])
    found: dict[str, Any] = {}
    if "distance" in plan.of_queries or "position" in plan.of_queries:
        position = jnp.pad(block.q_positions, [(0, 0), more], mode="edge")
        tiles = position.reshape(len(position), -1, plan.q_tile)
        found["distance"] = (tiles - tiles[:, :, :1]).astype(jnp.float32).reshape(position.shape)
        found["position"] = jax.lax.bitcast_convert_type(position, jnp.float32)
    if block.q_segments is not None:
        # Negative segment ids mark padding, which must match no id: queries get -1, and keys -2.
        segment = jnp.pad(jnp.maximum(block.q_segments, -1), [(0, 0), more], constant_values=-1)
        found["segment"] = jax.lax.bitcast_convert_type(segment, jnp.float32)
    kinds = [found[kind] for kind in plan.of_queries]
    return lse, delta, jnp.stack(jnp.broadcast_arrays(*kinds), 1) if kinds else None
