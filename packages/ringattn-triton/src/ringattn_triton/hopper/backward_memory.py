# SPDX-License-Identifier: Apache-2.0
"""The shared memory and the barriers through which the warps of a one-pass backward program exchange data.

Stages of one kind share an allocation: each allocation costs a consumer a register, and consumers have none left.
"""

from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..kernels.tile_loop import owned
from .hardware_barriers import begin, read_number, wait_until_empty, wait_until_full, write_number
from .head_tiles import stages_of_heads, stages_of_tiles
from .layouts import plain_layout, product_layout, single_layout
from .workarounds import place_as

_INDEX: Final = {
    # Numbers. Those of turns have two stages: the number of a turn, and how many masked, whole and again masked steps
    # it has for each head. "tile" is the query tile in each stage of queries.
    "turn": 0, "masked_before": 2, "whole": 4, "masked_after": 6, "tile": 8,
    # Barriers in shared memory (the table in `backward_kernel`). Those of turns have two stages.
    "turn_full": 0, "turn_empty": 2, "kv_empty": 4, "dout_full": 5,
}  # fmt: skip
"""The index in `BackwardMemory.numbers` or `BackwardMemory.barriers` of the first stage of a name."""


class BackwardMemory(NamedTuple):
    """The shared memory through which the warps of a program exchange data.

    `q`, `dout`, `k` and `v` are tuples of pieces of heads (`head_tiles`). `dout` may share the allocation of `q`, and
    `v` that of `k`: `BackwardPlan` has their first stages. Fields that a plan or call does not use are 0.
    """

    barriers: Any  # by names (`barrier`)
    q_full: Any  # a barrier for each stage of queries
    numbers: Any  # by names (`read`, `write`)
    per_query: Any  # lse, -delta and each of `PLAN.query_kinds`, in stages as q, but -delta as dout (`value_stages`)
    q: Any
    dout: Any
    k: Any
    v: Any
    ds: Any  # the gradient of the scores, keys as rows, in stages as q; `backward_wide_products` has one place
    dq: Any  # a square for each consumer, or its dv or dk at the end of a turn (`result_place`); if wide, place 2 is
    # the second square of consumer 0
    bias: Any  # in stages as q
    split: Any  # if `PLAN.subtracting`, lse and then -delta in place of those in `per_query`: 16 numbers to a query


@gluon.jit
def allocate(TYPE: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """Allocates the `BackwardMemory` of a program and initialises its barriers."""
    DS_ROWS: gl.constexpr = PLAN.kv_tile * (2 if PLAN.wide else 1)  # float32 weights take twice the room of ds
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    Q_STAGES: gl.constexpr = PLAN.q_stages + (0 if PLAN.wide else PLAN.dout_stages)
    K_STAGES: gl.constexpr = 1 if PLAN.wide else 2
    VALUES: gl.constexpr = _count(PLAN)
    q = stages_of_heads(TYPE, Q_STAGES, Q_STAGES, PLAN.q_tile, F.head_dim)
    k = stages_of_heads(TYPE, K_STAGES, K_STAGES, PLAN.kv_tile, F.head_dim)
    bias = stages_of_tiles(TYPE, PLAN.q_stages, PLAN.q_tile, PLAN.kv_tile) if F.bias else 0
    dout = stages_of_heads(TYPE, PLAN.dout_stages, PLAN.dout_stages, PLAN.q_tile, F.value_dim) if PLAN.wide else q
    v = stages_of_heads(TYPE, 1, 1, PLAN.kv_tile, F.value_dim) if PLAN.wide else k
    per_query = gl.allocate_shared_memory(gl.float32, [VALUES, 1, PLAN.q_tile], plain_layout()) if VALUES > 0 else 0
    split = stages_of_tiles(TYPE, PLAN.q_stages + PLAN.dout_stages, PLAN.q_tile, 16) if PLAN.subtracting else 0
    shared = BackwardMemory(
        barriers=gl.allocate_shared_memory(gl.int64, [8, 1], BARRIER),
        q_full=gl.allocate_shared_memory(gl.int64, [PLAN.q_stages, 1], BARRIER),
        numbers=gl.allocate_shared_memory(gl.int32, [16, 1], single_layout()),
        per_query=per_query,
        q=q,
        dout=dout,
        k=k,
        v=v,
        ds=stages_of_tiles(TYPE, 1 if PLAN.wide else PLAN.q_stages, DS_ROWS, PLAN.q_tile),
        dq=gl.allocate_shared_memory(gl.float32, [3 if PLAN.wide else 2, 16, 256], plain_layout()),
        bias=bias,
        split=split,
    )
    begin(shared.barriers, 2, 1, _index("turn_full"))
    begin(shared.barriers, 2, 4, _index("turn_empty"))
    begin(shared.barriers, 1, 2, _index("kv_empty"))
    begin(shared.q_full, PLAN.q_stages)
    begin(shared.barriers, PLAN.dout_stages, 1, _index("dout_full"))
    return shared


@gluon.constexpr_function
def _index(NAME):
    return _INDEX[NAME]


@gluon.constexpr_function
def _count(PLAN):
    """The number of all stages of `BackwardMemory.per_query`."""
    return sum(count for _, count in PLAN.value_stages.values())


@gluon.jit
def barrier(shared, NAME: gl.constexpr, stage):
    """The barrier `NAME` of stage `stage`."""
    return shared.barriers.index(_index(NAME) + stage)


@gluon.jit
def wait_for(shared, NAME: gl.constexpr, number, STAGES: gl.constexpr):
    """Waits until the stage of use `number` of `STAGES` stages is full, as the barriers `NAME` say."""
    wait_until_full(shared.barriers, number, STAGES, _index(NAME))


@gluon.jit
def wait_for_room(shared, NAME: gl.constexpr, number, STAGES: gl.constexpr):
    """Waits until the stage of use `number` of `STAGES` stages is empty, as the barriers `NAME` say."""
    wait_until_empty(shared.barriers, number, STAGES, _index(NAME))


@gluon.jit
def read(shared, NAME: gl.constexpr, stage, WARPS: gl.constexpr = 4):
    """Reads the number `NAME` of stage `stage`, in a partition of `WARPS` warps."""
    return read_number(shared.numbers.index(_index(NAME) + stage), WARPS)


@gluon.jit
def write(shared, NAME: gl.constexpr, stage, number):
    """Writes the number `NAME` of stage `stage`, in a partition of one warp."""
    write_number(shared.numbers.index(_index(NAME) + stage), number)


@gluon.constexpr_function
def first_stage(KIND, PLAN):
    """The first stage in `BackwardMemory.per_query` for `KIND`: "lse", "delta" or one of `PLAN.query_kinds`."""
    return PLAN.value_stages[KIND][0]


@gluon.jit
def load_query_values(shared, KIND: gl.constexpr, stage, PLAN: gl.constexpr):
    """Reads the values of kind `KIND` of the queries in `stage`, as a row of a tile of scores."""
    return shared.per_query.index(first_stage(KIND, PLAN) + stage).load(product_layout(PLAN.q_tile))


@gluon.jit
def result_place(shared, CONSUMER: gl.constexpr, TYPE: gl.constexpr, DIM: gl.constexpr):
    """The place of dq of consumer `CONSUMER`, reinterpreted as a place for its 64 rows of dk or dv in half
    precision."""
    return place_as(shared.dq.index(CONSUMER), TYPE, [64, DIM], gl.NVMMASharedLayout.get_default_for([64, DIM], TYPE))


@gluon.jit
def weights_place(shared):
    """The place of ds for heads above 128, as float32 `[16, 256]` for the softmax weights, in register order."""
    return place_as(shared.ds.index(0), gl.float32, [16, 256], plain_layout())


@gluon.jit
def finish_turn(shared, turns_done, T: gl.constexpr, KV_HEADS: gl.constexpr):
    """Called by a consumer at the end of a turn: returns its key tile, batch row and key head.

    They come from shared memory once more, so that no registers hold them through the loops. Then the turn's numbers
    may be overwritten.
    """
    owner = owned(read(shared, "turn", turns_done % 2), T, KV_HEADS)
    mbarrier.arrive(barrier(shared, "turn_empty", turns_done % 2), count=1)
    return owner


@gluon.jit
def next_turn(shared, turns_done, WARPS: gl.constexpr):
    """Waits for turn `turns_done` of this program. Returns its number; if none is left, `turns.count` or more."""
    wait_for(shared, "turn_full", turns_done, 2)
    return read(shared, "turn", turns_done % 2, WARPS)
