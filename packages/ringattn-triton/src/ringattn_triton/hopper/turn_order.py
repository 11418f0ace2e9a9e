# SPDX-License-Identifier: Apache-2.0
# pyright: standard, reportUndefinedVariable=false, reportInvalidTypeForm=false
"""In which order the one-pass backward kernel takes its turns, and how many key heads run side by side.

These rules change the time, and the order of sums: of turns that add to dq, and of the steps of a turn that add to dk
and dv. What they gain was measured: docs/kernels.md, "The backward pass".
"""

import dataclasses
import math
from typing import Final, NamedTuple

from ringattn_core.contract.protocol import Block

from .. import grouped_rows, sparsity
from ..kernel_inputs import BlockConstants, power_of_two
from . import plans
from .plans import BackwardPlan

_TURNS_AT_ONCE: Final = 512
"""How many turns (key tiles) the key heads that run side by side have in all, where turns do not wait for each other:
few enough for the cache to hold their queries."""
_IN_CACHE: Final = 2**25
"""The most bytes of queries, dout and dq (in float32) that the cache holds, over all heads that run at once."""
_ABREAST: Final = 16
"""The most neighbouring key tiles that begin together where `_abreast` allows it."""
_STEPS_SHORTER: Final = 16
"""The least number of steps by which a turn under a causal mask is shorter than the turn before it, for neighbouring
turns to begin together. With fewer steps the cache still holds most query tiles from one turn to the next."""
_STEPS_BETWEEN: Final = 1.9
"""How many steps apart interleaved turns of a head begin, at least: closer, they wait for each other."""


class _Limits(NamedTuple):
    """Limits for turns that wait for each other: `_NARROW` for head sizes up to 128, `_WIDE` for those above. All are
    fitted to measurements."""

    heads_at_once: int
    """The most key heads whose turns run side by side: as many as the cache holds of short rows."""
    ratio_at_once: int
    """The least ratio of a turn's steps to the number of turns of its key head that run at once; each of these turns
    begins 1.5 steps after the one before, with wide heads more."""
    ratio_if_all: int
    """The least ratio of a turn's steps to the number of turns of its head that would run at once if all heads ran side
    by side: a turn has at least so many times `PROGRAMS / heads` steps. Below it, turns wait too long for each other,
    and two passes (one for dk and dv, one for dq) are faster."""


_NARROW: Final = _Limits(heads_at_once=16, ratio_at_once=16, ratio_if_all=8)
_WIDE: Final = _Limits(heads_at_once=4, ratio_at_once=31, ratio_if_all=2)


class Arranged(NamedTuple):
    """The plan with the order of its turns, and two arguments of `visited_tiles.table`."""

    plan: BackwardPlan
    turns_at_once: int
    """`rows_at_once`: how many turns the key heads that run side by side have in all."""
    heads: int
    """The number of key heads that turns are spread over: those of one batch row, or of all."""


def arranged(plan: BackwardPlan, block: Block, constants: BlockConstants) -> Arranged:
    """Decides the order of the turns of a block."""
    in_strips = block.bias is not None and not block.bias_fixed  # then a launch has only a few turns of each head
    if not _in_order(block, constants, plan):
        return Arranged(plan, _TURNS_AT_ONCE, constants.kv_heads)
    upwards = 0 if in_strips else _heads_upwards(block, constants, plan)
    interleaved = _heads_interleaved(block, constants, plan)
    heads = upwards or interleaved or _heads_in_order(block, constants, plan)
    plan = dataclasses.replace(
        plan,
        ordered=True,
        heads_inside=_heads_inside(block, constants),
        upwards=upwards > 0,
        interleaved=interleaved > 0,
        abreast=1 if upwards or in_strips else _abreast(block, constants, plan),
    )
    return Arranged(plan, heads * _turns_of_head(constants, plan), len(block.q) * constants.kv_heads)


def _in_order(block: Block, constants: BlockConstants, plan: BackwardPlan) -> bool:
    """Whether turns add to dq in order: if the caller wants the same bits at every run, or if it is faster.

    It is faster with large groups, whose turns share tiles in the cache, and with few tokens or documents, because dq
    needs no zeros.
    """
    faster = constants.group >= 8 or constants.q_length <= 2048 or sparsity.scattered(block)
    return not block.rule.fused_backward or (faster and not plan.wide and enough_heads(block, constants, plan))


def enough_heads(block: Block, constants: BlockConstants, plan: BackwardPlan) -> bool:
    """Whether enough heads run at once for turns to wait seldom. (A turn waits only for turns of the same head.)"""
    least = -(-(_WIDE if plan.wide else _NARROW).ratio_if_all * plans.PROGRAMS // _steps_of_all(constants, plan))
    return len(block.q) * constants.kv_heads >= min(plans.PROGRAMS, least)


def _heads_in_order(block: Block, constants: BlockConstants, plan: BackwardPlan) -> int:
    """How many key heads have turns side by side where turns wait for each other.

    The turns of one head share query tiles in the cache while they are in step. Under a causal mask they stay in step
    if half of the turns run at once: each program then takes a long turn and a short one, and all begin the next heads
    together. With documents, short turns of few heads would wait for each other, while one long document takes the
    same time with any number of heads. With bits, the turn of a block that all queries choose is the longest, and the
    other turns of its head follow it; so as many heads run side by side as the limit allows. Turns of
    wide heads that see all keys get out of step, so no more heads run than the cache holds, but enough for every
    program to have a turn. Under a mask, if the cache does not hold one wide head, two run side by side.
    """
    most, ratio, _ = _WIDE if plan.wide else _NARROW
    if (block.bits is not None or sparsity.scattered(block)) and not plan.wide:
        return most
    turns = _turns_of_head(constants, plan)
    if plan.wide and not constants.masked:
        most = min(most, max(-(-plans.PROGRAMS // turns), _heads_in_cache(constants)))
    elif plan.wide and not _heads_in_cache(constants):
        most = 2
    return min(most, max(2 * plans.PROGRAMS // turns, ratio * plans.PROGRAMS // _steps_of_all(constants, plan), 1))


def _heads_upwards(block: Block, constants: BlockConstants, plan: BackwardPlan) -> int:
    """How many key heads run side by side if turns go upwards (`backward_turns.steps_of`); 0 if they must not.

    It is the least power of two that gives every program a turn, but 0 if the cache does not hold so many heads, for
    head sizes above 128, where it takes too long to add to dq, and with documents, where turns may be short.
    """
    heads = power_of_two(-(-plans.PROGRAMS // _turns_of_head(constants, plan)))
    return 0 if plan.wide or sparsity.scattered(block) or heads > _heads_in_cache(constants) else heads


def _heads_interleaved(block: Block, constants: BlockConstants, plan: BackwardPlan) -> int:
    """How many key heads run side by side if turns are interleaved (`backward_turns.take_turn`); 0 if they must not be.

    Turns of a head then begin `heads * steps / PROGRAMS` steps apart, where `steps` is the number of steps of its first
    turn. It is the least power of two that makes this enough, but 0 if the cache does not hold so many heads. (Fewer
    run side by side if their number does not divide by it.) Heads up to 128 hand tiles of dq over faster, and go
    upwards.
    """
    heads = power_of_two(math.ceil(_STEPS_BETWEEN * plans.PROGRAMS / _steps_of_all(constants, plan)))
    return heads if plan.wide and heads <= _heads_in_cache(constants) and sparsity.causal_alone(block) else 0


def _abreast(block: Block, constants: BlockConstants, plan: BackwardPlan) -> int:
    """How many turns of neighbouring key tiles of a head begin together (`backward_turns.take_turn`).

    Under a causal mask, neighbouring turns that begin together end `shorter` steps apart, and so the next ones would
    begin. With many heads in a group, each turn would then read its query tiles from memory. So the 32nd part of a
    head's turns begins together; with more, the first of them would wait too long for the last. Heads above 128 gain
    nothing. Where queries choose blocks and the heads of a group are rows (`grouped_rows`), turns get shorter as well.
    """
    rows = grouped_rows.rows_of_a_query(block)
    if rows > 1:
        block, constants = dataclasses.replace(block, bits=None), constants.without_masks
    shorter = constants.group * rows * plan.kv_tile // plan.q_tile
    in_step = sparsity.causal_alone(block) and not constants.by_head
    gains = shorter >= _STEPS_SHORTER and in_step and not plan.wide
    return min(max(_turns_of_head(constants, plan) // 32, 1), _ABREAST) if gains else 1


def _heads_inside(block: Block, constants: BlockConstants) -> bool:
    """Whether an ordered turn visits a query tile for all heads of its group before the next tile.

    With all tiles for one head first, turns are soon at different heads, because they visit different numbers of tiles,
    and share no tiles in the cache. But under a sliding window, turns that run at once are at different tiles anyway,
    as far apart as their keys, and the cache does not hold these tiles for all heads. Options that depend on the head
    are read once for each head, so heads come one at a time there, too.
    """
    left = block.reach.left
    return (left is None or left >= constants.q_length) and not constants.by_head


def _heads_in_cache(constants: BlockConstants) -> int:
    """Of how many key heads the cache holds the queries, dout and dq (in float32)."""
    return _IN_CACHE // (8 * constants.group * constants.q_length * constants.padded_head_dim)


def _turns_of_head(constants: BlockConstants, plan: BackwardPlan) -> int:
    """The number of turns (key tiles) of a key head."""
    return -(-constants.kv_length // plan.kv_tile)


def _steps_of_all(constants: BlockConstants, plan: BackwardPlan) -> int:
    """The number of steps of a turn that sees all queries, over all query heads of its group."""
    return -(-constants.q_length // plan.q_tile) * constants.group
