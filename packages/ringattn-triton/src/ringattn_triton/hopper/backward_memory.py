# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
"""What the warps of a one-pass backward program hand to each other in shared memory, and its barriers.

Places of one kind share an allocation: each allocation costs a consumer a register, and it has none to spare.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Memory(NamedTuple):
    """The allocations. `shared_places` names what is in them."""

    barriers: Any
    numbers: Any
    rows: Any
    queries: Any
    keys: Any
    ds: Any
    dq: Any


class Shared(NamedTuple):
    """`x_full` says that a place of `x` holds new data, `x_empty` that its readers are done with it.

    Of a turn there are its number, and how many steps it has `before` those that see everything, how many of those
    (`whole`), and how many `after` them. `kv` holds its keys, then its values. In `queries` place `i` is a tile of q
    and place `STAGES + i` one of dout; in `rows` they are the rows' lse and -delta, and come with those. For
    ALiBi place `2 STAGES + i` is how far the rows' positions are from the tile's first. `tile` is the
    number of a query tile. `ds` is the derivative by the scores, keys as rows, of both consumers. `dq` has a place for
    each half of a tile: consumer `c` fills places `2 i + c`.
    """

    turn: Any
    before: Any
    whole: Any
    after: Any
    turn_full: Any
    turn_empty: Any
    kv: Any
    kv_full: Any
    kv_empty: Any
    queries: Any
    rows: Any
    tile: Any
    q_full: Any
    q_empty: Any
    dout_full: Any
    dout_empty: Any
    ds: Any
    ds_full: Any
    dq: Any
    dq_full: Any
    dq_empty: Any


class Places(NamedTuple):
    """Places of an allocation from number `first` on."""

    all: Any
    first: Any


@gluon.jit
def at(places, number):
    """One of the `Places`."""
    return places.all.index(places.first + number)


@gluon.jit
def shared_memory(
    TYPE: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr, DS: gl.constexpr, PLAIN: gl.constexpr,
    F: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """The allocations in these layouts, with barriers that are ready to be used."""
    STAGES: gl.constexpr = PLAN.stages
    BARRIERS: gl.constexpr = PLAN.barriers
    NUMBER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    memory = Memory(
        barriers=gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout()),
        numbers=gl.allocate_shared_memory(gl.int32, [16, 1], NUMBER),
        rows=gl.allocate_shared_memory(gl.float32, [(3 if F.slopes else 2) * STAGES, 1, PLAN.q_tile], PLAIN),
        queries=gl.allocate_shared_memory(TYPE, [2 * STAGES, PLAN.q_tile, F.head_dim], QUERIES),
        keys=gl.allocate_shared_memory(TYPE, [2, PLAN.kv_tile, F.head_dim], KEYS),
        ds=gl.allocate_shared_memory(TYPE, [PLAN.ds_places, PLAN.kv_tile, PLAN.q_tile], DS),
        dq=gl.allocate_shared_memory(gl.float32, [2 * PLAN.dq_places, 16, 256], PLAIN),
    )
    shared = shared_places(memory, PLAN)
    _begin(shared.turn_full, 2, 1)
    _begin(shared.turn_empty, 2, 2 + PLAN.writers)
    _begin(shared.kv_full, 1, 1)
    _begin(shared.kv_empty, 1, 2)
    _begin(shared.q_full, STAGES, 1)
    _begin(shared.q_empty, STAGES, 2)
    _begin(shared.dout_full, STAGES, 1)
    _begin(shared.dout_empty, STAGES, 2)
    _begin(shared.ds_full, PLAN.ds_places, 2)
    _begin(shared.dq_full, 2 * PLAN.writers, 1)
    _begin(shared.dq_empty, 2 * PLAN.dq_places, 1)
    return memory


@gluon.jit
def shared_places(memory, PLAN: gl.constexpr):
    """The places in the allocations, by name."""
    STAGES: gl.constexpr = PLAN.stages
    barriers = memory.barriers
    numbers = memory.numbers
    DS_FULL: gl.constexpr = 6 + 4 * STAGES
    DQ_FULL: gl.constexpr = DS_FULL + PLAN.ds_places
    return Shared(
        turn=Places(numbers, 0),
        before=Places(numbers, 2),
        whole=Places(numbers, 4),
        after=Places(numbers, 6),
        turn_full=Places(barriers, 0),
        turn_empty=Places(barriers, 2),
        kv=memory.keys,
        kv_full=Places(barriers, 4),
        kv_empty=Places(barriers, 5),
        queries=memory.queries,
        rows=memory.rows,
        tile=Places(numbers, 8),
        q_full=Places(barriers, 6),
        q_empty=Places(barriers, 6 + STAGES),
        dout_full=Places(barriers, 6 + 2 * STAGES),
        dout_empty=Places(barriers, 6 + 3 * STAGES),
        ds=memory.ds,
        ds_full=Places(barriers, DS_FULL),
        dq=memory.dq,
        dq_full=Places(barriers, DQ_FULL),
        dq_empty=Places(barriers, DQ_FULL + 2 * PLAN.writers),
    )


@gluon.jit
def _begin(barriers, COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Each of so many barriers completes a phase after so many arrivals."""
    for number in gl.static_range(COUNT):
        mbarrier.init(at(barriers, number), count=ARRIVALS)


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
    mbarrier.wait(at(shared.turn_full, taken % 2), (taken // 2) & 1)
    return got_number(at(shared.turn, taken % 2), WARPS)
