# SPDX-License-Identifier: Apache-2.0
"""Positions for ALiBi in the forward pass on Hopper, float32, relative to the turn's first query (the origin).

The producer loads and converts the positions of a tile of keys once for all threads, and puts them beside the keys.
They are exact up to a distance of 2^24 from the origin. There are twice as many places for positions as for keys: a
consumer reads positions after it has freed the place of the keys, and is done when it frees that of the next keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .head_tiles import product_layout


@gluon.jit
def origin_of(P, batch, row, F: gl.constexpr):
    """The origin of a turn: the position of its first query, `row`; 0 if the call has no ALiBi."""
    if F.distances:
        return gl.load(P.q_positions + (batch * F.q_positions_batch + row))
    else:
        return 0


@gluon.jit
def of_queries(queries, P, batch, row, F: gl.constexpr):
    """The positions of a consumer's queries minus the origin, that of query `row`; 0 if the call has no ALiBi."""
    if F.distances:
        from_origin = (queries.position - origin_of(P, batch, row, F)).to(gl.float32)
        return gl.max(from_origin, 1)
    else:
        return 0


@gluon.jit
def load_key_offsets(P, batch, tile, origin, F: gl.constexpr, KV_TILE: gl.constexpr):
    """Called by the producer: loads the positions of a tile's keys minus `origin`; 0 if the call has no ALiBi."""
    if F.distances:
        column = tile * KV_TILE + gl.arange(0, KV_TILE, gl.BlockedLayout([KV_TILE // 32], [32], [1], [0]))
        if F.kv_length % KV_TILE != 0:
            column = gl.minimum(column, F.kv_length - 1)
        return (gl.load(P.kv_positions + (batch * F.kv_positions_batch + column)) - origin).to(gl.float32)
    else:
        return 0


@gluon.jit
def offsets_stage(shared, number, PLAN: gl.constexpr):
    """The place in shared memory for the positions of key tile number `number` (from 0) of a program."""
    return shared.positions.index(number % (2 * PLAN.stages))


@gluon.jit
def of_keys(shared, taken, F: gl.constexpr, PLAN: gl.constexpr):
    """Called by a consumer: a row, the positions of the keys of tile `taken` minus the origin; 0 without ALiBi."""
    if F.distances:
        return offsets_stage(shared, taken, PLAN).load(gl.SliceLayout(0, product_layout(PLAN.kv_tile)))[None, :]
    else:
        return 0
