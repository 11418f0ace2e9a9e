# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Which keys a turn of the one-pass backward owns, and which query tiles it visits in which order."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.tile_loop import full_tile, masked_tile, owned, visit


class Steps(NamedTuple):
    """The query tiles that a turn visits for each head: `before` to mask, `whole` ones, and `after` to mask."""

    visited: Any
    before: Any
    whole: Any
    after: Any


@gluon.jit
def keys_of(turn, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The key tile, batch row and key head of a turn: the lowest tiles first, which a causal mask shows to most.

    Key tiles that run side by side (`PLAN.side_by_side`) go backwards, so that those which add to a query tile one
    after the other (`backward_transfers.add_dq`) come to it in that order: under a causal mask each begins at its diagonal.
    """
    number, batch, kv_head = owned(turn, T, F.kv_heads)
    row = number
    if PLAN.side_by_side > 1:
        first = number // PLAN.side_by_side * PLAN.side_by_side
        last = gl.minimum(first + PLAN.side_by_side, T.rows) - 1
        row = last - (number - first)
    return row, batch, kv_head


@gluon.jit
def steps_of(row, batch, BOUNDS, TILES, T: gl.constexpr):
    """What a turn visits. Tiles to mask that are listed come first, ranges from left to right."""
    visited = visit(BOUNDS, TILES, batch, row, T)
    whole = visited.full_to - visited.full_from
    if T.listed:
        return Steps(visited, visited.masked, whole, 0)
    else:
        return Steps(visited, visited.before, whole, visited.masked - visited.before)


@gluon.jit
def tile_at(steps, step, T: gl.constexpr):
    """The number of the query tile of a step; any number after the last."""
    inside = step - steps.before
    if (inside >= 0) & (inside < steps.whole):
        tile = full_tile(steps.visited, steps.visited.full_from + inside, T)
    else:
        tile = masked_tile(steps.visited, gl.where(inside < 0, step, step - steps.whole), T)
    return tile
