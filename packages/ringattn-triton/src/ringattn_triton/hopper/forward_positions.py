# SPDX-License-Identifier: Apache-2.0
"""Positions for ALiBi in the forward pass on Hopper, float32, relative to the turn's first query (the origin).

The producer loads and converts the positions of a tile of keys once for all threads, and puts them beside the keys.
They are exact up to a distance of 2^24 from the origin. There are twice as many stages for positions as for keys: a
consumer reads positions after it has freed the stage of the keys, and is done when it frees that of the next keys.
Without ALiBi all functions return 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import product_layout


@gluon.jit
def origin_of(P, batch, first_query, F: gl.constexpr):
    """The origin of a turn: the position of its first query."""
    return gl.load(P.q_positions + (batch * F.q_positions_batch + first_query)) if F.slopes else 0


@gluon.jit
def query_offsets(queries, P, batch, first_query, F: gl.constexpr):
    """The positions of a consumer's queries minus the origin."""
    if F.slopes:
        return gl.max((queries.position - origin_of(P, batch, first_query, F)).to(gl.float32), 1)
    else:
        return 0


@gluon.jit
def load_key_offsets(P, batch, column, origin, F: gl.constexpr, KV_TILE: gl.constexpr):
    """Loads the positions of keys minus `origin`. `column` has their numbers, in tiles of `KV_TILE`."""
    if F.kv_length % KV_TILE != 0:
        column = gl.minimum(column, F.kv_length - 1)
    return (gl.load(P.kv_positions + (batch * F.kv_positions_batch + column)) - origin).to(gl.float32)


@gluon.jit
def offsets_stage(shared, step, PLAN: gl.constexpr):
    """The stage for the positions of the keys of step `step` of a program."""
    return shared.key_offsets.index(step % (2 * PLAN.kv_stages))


@gluon.jit
def key_offsets(shared, step, F: gl.constexpr, PLAN: gl.constexpr):
    """Called by a consumer: a row, the positions of the keys of step `step` minus the origin."""
    if F.slopes:
        return offsets_stage(shared, step, PLAN).load(gl.SliceLayout(0, product_layout(PLAN.kv_tile)))[None, :]
    else:
        return 0
