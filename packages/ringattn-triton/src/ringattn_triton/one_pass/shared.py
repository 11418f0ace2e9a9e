# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
"""What the warps of a one-pass backward program hand to each other in shared memory, and its barriers."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Shared(NamedTuple):
    """`x_full` says that a place of `x` holds new data, `x_empty` that its readers are done with it.

    `turn` is the number of a turn. `k` and `v` are its 128 keys and values. `q`, `lse` and `tile` (the number of a
    query tile) share `q_full`; `dout` and `minus_delta` share `dout_full`. `ds` is the derivative by the scores, keys as
    rows, of both consumers. `dq` has a place for each half of a tile: consumer `c` fills places `2 i + c`.
    """

    turn: Any
    turn_full: Any
    turn_empty: Any
    k: Any
    v: Any
    kv_full: Any
    kv_empty: Any
    q: Any
    lse: Any
    tile: Any
    q_full: Any
    q_empty: Any
    dout: Any
    minus_delta: Any
    dout_full: Any
    dout_empty: Any
    ds: Any
    ds_full: Any
    dq: Any
    dq_full: Any
    dq_empty: Any


@gluon.jit
def shared_memory(
    TYPE: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr, DS: gl.constexpr, PLAIN: gl.constexpr,
    DIM: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """All places in these layouts, with barriers that are ready to be used."""
    Q_TILE: gl.constexpr = PLAN.q_tile
    STAGES: gl.constexpr = PLAN.stages
    HALVES: gl.constexpr = 2 * PLAN.dq_places
    NUMBER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return Shared(
        turn=gl.allocate_shared_memory(gl.int32, [2, 1], NUMBER),
        turn_full=_barriers(2, 1),
        turn_empty=_barriers(2, 3),
        k=gl.allocate_shared_memory(TYPE, [PLAN.kv_tile, DIM], KEYS),
        v=gl.allocate_shared_memory(TYPE, [PLAN.kv_tile, DIM], KEYS),
        kv_full=_barriers(1, 1),
        kv_empty=_barriers(1, 2),
        q=gl.allocate_shared_memory(TYPE, [STAGES, Q_TILE, DIM], QUERIES),
        lse=gl.allocate_shared_memory(gl.float32, [STAGES, 1, Q_TILE], PLAIN),
        tile=gl.allocate_shared_memory(gl.int32, [STAGES, 1], NUMBER),
        q_full=_barriers(STAGES, 1),
        q_empty=_barriers(STAGES, 2),
        dout=gl.allocate_shared_memory(TYPE, [STAGES, Q_TILE, DIM], QUERIES),
        minus_delta=gl.allocate_shared_memory(gl.float32, [STAGES, 1, Q_TILE], PLAIN),
        dout_full=_barriers(STAGES, 1),
        dout_empty=_barriers(STAGES, 2),
        ds=gl.allocate_shared_memory(TYPE, [PLAN.ds_places, PLAN.kv_tile, Q_TILE], DS),
        ds_full=_barriers(PLAN.ds_places, 2),
        dq=gl.allocate_shared_memory(gl.float32, [HALVES, 16, 256], PLAIN),
        dq_full=_barriers(HALVES, 1),
        dq_empty=_barriers(HALVES, 1),
    )


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each of which completes a phase after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(COUNT):
        mbarrier.init(barriers.index(number), count=ARRIVALS)
    return barriers


@gluon.jit
def put_number(place, number):
    """Writes one number to a place, by a partition of one warp."""
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def got_number(place, WARPS: gl.constexpr):
    """The number in a place, for all threads of a partition of so many warps."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def next_turn(shared, taken, WARPS: gl.constexpr):
    """The number of the program's turn after so many `taken`; not less than their count where none is left."""
    mbarrier.wait(shared.turn_full.index(taken % 2), (taken // 2) & 1)
    return got_number(shared.turn.index(taken % 2), WARPS)
