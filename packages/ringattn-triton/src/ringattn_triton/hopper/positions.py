# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
"""Positions from which the forward pass on Hopper computes distances: float32, counted from the first query of a turn.

The producer loads and converts the positions of a tile of keys once for all threads, and puts them beside the keys.
They are exact up to 2^24 from the origin. They have twice as many places as keys: a consumer reads them after it has
left the place of the keys, and is done when it leaves that of the next keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def origin_of(P, batch, row, F: gl.constexpr):
    """The position of the first query of a turn, or 0 where scores depend on no distance."""
    if F.distances:
        return gl.load(P.q_positions + (batch * F.q_positions_batch + row))
    else:
        return 0


@gluon.jit
def of_queries(queries, P, batch, row, F: gl.constexpr):
    """How far the queries of a consumer are from the origin, or 0 where scores depend on no distance."""
    if F.distances:
        from_origin = (queries.position - origin_of(P, batch, row, F)).to(gl.float32)
        return gl.max(from_origin, 1)
    else:
        return 0


@gluon.jit
def loaded_of_keys(P, batch, tile, origin, F: gl.constexpr, KV_TILE: gl.constexpr):
    """Loads, as the producer, how far the keys of a tile are from the origin."""
    if F.distances:
        column = tile * KV_TILE + gl.arange(0, KV_TILE, gl.BlockedLayout([KV_TILE // 32], [32], [1], [0]))
        if F.kv_length % KV_TILE != 0:
            column = gl.minimum(column, F.kv_length - 1)
        return (gl.load(P.kv_positions + (batch * F.kv_positions_batch + column)) - origin).to(gl.float32)
    else:
        return 0


@gluon.jit
def place_of_positions(shared, number, PLAN: gl.constexpr):
    """The place for the positions of the `number`th tile that a program fetches."""
    return shared.positions.index(number % (2 * PLAN.stages))


@gluon.jit
def of_keys(shared, taken, F: gl.constexpr, PLAN: gl.constexpr, SCORES: gl.constexpr):
    """How far the keys of a tile are from the origin, as a row of scores, or 0 where scores depend on no distance."""
    if F.distances:
        return place_of_positions(shared, taken, PLAN).load(gl.SliceLayout(0, SCORES))[None, :]
    else:
        return 0
