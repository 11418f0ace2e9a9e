# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Which keys a turn of the one-pass backward owns, and which query tiles it visits in which order."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.tiles import full_tile, masked_tile, owned, visit


class Work(NamedTuple):
    """What one turn does: key tile `row` of a key head, against `steps` query tiles of each query head.

    The first `masked` steps need a mask. `visited` is the row of the table.
    """

    row: Any
    batch: Any
    kv_head: Any
    visited: Any
    masked: Any
    steps: Any


@gluon.jit
def work_of(turn, TABLE, TILES, F: gl.constexpr, V: gl.constexpr, PLAN: gl.constexpr):
    """The work of a turn: the lowest key tiles first, which a causal mask shows to most queries.

    Key tiles that run side by side (`PLAN.side_by_side`) go backwards, so that those which add to a query tile one
    after the other (`transfers.add_dq`) come to it in that order: under a causal mask each begins at its diagonal.
    """
    number, batch, kv_head = owned(turn, V, F.kv_heads)
    row = number
    if PLAN.side_by_side > 1:
        first = number // PLAN.side_by_side * PLAN.side_by_side
        last = gl.minimum(first + PLAN.side_by_side, V.rows) - 1
        row = last - (number - first)
    visited = visit(TABLE, TILES, batch, row, V)
    steps = visited.masked + visited.full_to - visited.full_from
    return Work(row, batch, kv_head, visited, visited.masked, steps)


@gluon.jit
def tile_at(work, step, V: gl.constexpr):
    """The number of the query tile of a step; any number after the last."""
    if step < work.masked:
        tile = masked_tile(work.visited, step, V)
    else:
        tile = full_tile(work.visited, work.visited.full_from + (step - work.masked), V)
    return tile
