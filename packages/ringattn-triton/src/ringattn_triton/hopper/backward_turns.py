# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Which query tiles a turn of the one-pass backward visits, in which order. A turn owns a tile of keys."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.tile_loop import full_tile, masked_tile, owned, visit


class Steps(NamedTuple):
    """The query tiles that a turn visits for each head: `before` to mask, then `whole` ones, then `after` to mask."""

    visited: Any
    before: Any
    whole: Any
    after: Any


@gluon.jit
def owner(turn, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The key tile, batch row and key head of a turn."""
    row, batch, kv_head = owned(turn, T, F.kv_heads)
    if PLAN.last_first:
        row = T.rows - 1 - row
    return row, batch, kv_head


@gluon.jit
def steps_of(row, batch, BOUNDS, TILES, T: gl.constexpr, PLAN: gl.constexpr):
    """What a turn visits, from the first query tile to the last, or from the last to the first."""
    visited = visit(BOUNDS, TILES, batch, row, T)
    whole = visited.full_to - visited.full_from
    after = visited.masked - visited.before
    if PLAN.ordered and not PLAN.last_first:
        return Steps(visited, after, whole, visited.before)
    else:
        return Steps(visited, visited.before, whole, after)


@gluon.jit
def tile_at(steps, step, T: gl.constexpr, PLAN: gl.constexpr):
    """The number of the query tile of a step; any number after the last."""
    number = step
    before = steps.before
    if PLAN.ordered and not PLAN.last_first:
        number = gl.maximum(steps.before + steps.whole + steps.after - 1 - step, 0)
        before = steps.after
    inside = number - before
    if (inside >= 0) & (inside < steps.whole):
        tile = full_tile(steps.visited, steps.visited.full_from + inside, T)
    else:
        tile = masked_tile(steps.visited, gl.where(inside < 0, number, number - steps.whole), T)
    return tile
