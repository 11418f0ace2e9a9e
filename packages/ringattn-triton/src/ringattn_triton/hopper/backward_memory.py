# SPDX-License-Identifier: Apache-2.0
"""The shared memory and the barriers through which the warps of a one-pass backward program exchange data.

Places of one kind share an allocation: each allocation costs a consumer a register, and consumers have none left.
"""

from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..kernels.tile_loop import owned
from .hardware_barriers import begin, read_number, wait_until_empty, wait_until_full, write_number
from .head_tiles import stages_of_heads
from .workarounds import place_as

_NUMBERS: Final = {"turn": 0, "before": 2, "whole": 4, "after": 6, "tile": 8}
"""The index in `BackwardMemory.numbers` of the first of two places of a number. Turns use their two places alternately:
"turn" is the number of a turn (one key tile of one head). It begins with "before" steps that need a mask, then come
"whole" steps that need none, and "after" steps that need one. "tile" is the query tile in each place of queries."""
_BARRIERS: Final = {"turn_full": 0, "turn_empty": 2, "kv_empty": 4, "dout_full": 5}
"""The index in `BackwardMemory.barriers` of the first barrier of a name (the table in `backward_kernel`)."""


class BackwardMemory(NamedTuple):
    """The shared memory through which the warps of a program exchange data.

    `numbers` and `barriers` have names (`read`, `write`, `barrier`), and `q_full` has a barrier for each place of
    queries. Barriers lie in shared memory where TMA arrives, or where they tell of turns. The others are hardware
    barriers (`BackwardPlan.hardware_barriers`). `x_full` says that a place of `x` holds new data, `x_empty` that its
    readers are done with the data.

    `q`, `dout`, `k` and `v` are tuples of pieces of heads (`head_tiles`). `dout` may share the allocation of `q`, and
    `v` that of `k`: `BackwardPlan` has their first places. `rows` holds lse, -delta and each kind of number in
    `PLAN.of_queries`; the places of a kind begin at `first_place`. Place `i` of -delta belongs to place `i` of `dout`.
    Place `i` of any other kind, and of `bias`, belongs to place `i` of `q`. If `PLAN.subtracting`, lse and -delta lie
    in `parts` instead, first lse, with 16 numbers to a query (`backward_kernel._tiles_of_numbers`). `ds` is the
    gradient of the scores, with keys as rows; in `backward_wide_products` its place first holds the softmax weights.
    Each place of `dq` has a piece of a tile, 64 queries by 64 dimensions, or at the end of a turn a consumer's dv or dk
    (`result_place`). Consumer `c` uses the places `2 i + c`.
    """

    barriers: Any
    q_full: Any
    numbers: Any
    rows: Any
    q: Any
    dout: Any
    k: Any
    v: Any
    ds: Any
    dq: Any
    bias: Any
    parts: Any


@gluon.jit
def allocate(TYPE: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """Allocates the `BackwardMemory` of a program and initialises its barriers."""
    DS_ROWS: gl.constexpr = PLAN.kv_tile * (2 if PLAN.wide else 1)  # float32 weights take twice the room of ds
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DS_ROWS, PLAN.q_tile], TYPE)
    PLAIN: gl.constexpr = plain_layout()
    NUMBER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ROWS: gl.constexpr = first_place(None, PLAN)
    Q_PLACES: gl.constexpr = PLAN.stages + (0 if PLAN.wide else PLAN.dout_stages)
    K_PLACES: gl.constexpr = 1 if PLAN.wide else 2
    q = stages_of_heads(TYPE, Q_PLACES, Q_PLACES, PLAN.q_tile, F.head_dim)
    k = stages_of_heads(TYPE, K_PLACES, K_PLACES, PLAN.kv_tile, F.head_dim)
    dout = q
    v = k
    bias = 0
    if F.bias:
        BIAS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PLAN.q_tile, PLAN.kv_tile], TYPE)
        bias = gl.allocate_shared_memory(TYPE, [PLAN.stages, PLAN.q_tile, PLAN.kv_tile], BIAS)
    if PLAN.wide:
        dout = stages_of_heads(TYPE, PLAN.dout_stages, PLAN.dout_stages, PLAN.q_tile, F.value_dim)
        v = stages_of_heads(TYPE, 1, 1, PLAN.kv_tile, F.value_dim)
    rows = 0
    if ROWS > 0:
        rows = gl.allocate_shared_memory(gl.float32, [ROWS, 1, PLAN.q_tile], PLAIN)
    parts = 0
    if PLAN.subtracting:
        PARTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PLAN.q_tile, 16], TYPE)
        parts = gl.allocate_shared_memory(TYPE, [PLAN.stages + PLAN.dout_stages, PLAN.q_tile, 16], PARTS)
    shared = BackwardMemory(
        barriers=gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout()),
        q_full=gl.allocate_shared_memory(gl.int64, [PLAN.stages, 1], mbarrier.MBarrierLayout()),
        numbers=gl.allocate_shared_memory(gl.int32, [16, 1], NUMBER),
        rows=rows,
        q=q,
        dout=dout,
        k=k,
        v=v,
        ds=gl.allocate_shared_memory(TYPE, [1 if PLAN.wide else PLAN.stages, DS_ROWS, PLAN.q_tile], DS),
        dq=gl.allocate_shared_memory(gl.float32, [3 if PLAN.wide else 2, 16, 256], PLAIN),
        bias=bias,
        parts=parts,
    )
    begin(shared.barriers, 2, 1, _index("turn_full"))
    begin(shared.barriers, 2, 4, _index("turn_empty"))
    begin(shared.barriers, 1, 2, _index("kv_empty"))
    begin(shared.q_full, PLAN.stages)
    begin(shared.barriers, PLAN.dout_stages, 1, _index("dout_full"))
    return shared


@gluon.constexpr_function
def _index(NAME):
    return (_NUMBERS | _BARRIERS)[NAME]


@gluon.jit
def barrier(shared, NAME: gl.constexpr, place):
    """The barrier `NAME` (`_BARRIERS`) of place `place`."""
    return shared.barriers.index(_index(NAME) + place)


@gluon.jit
def wait_for(shared, NAME: gl.constexpr, number, STAGES: gl.constexpr):
    """Waits until the place of use `number` of `STAGES` places is full, as the barriers `NAME` (`_BARRIERS`) say."""
    wait_until_full(shared.barriers, number, STAGES, _index(NAME))


@gluon.jit
def wait_for_room(shared, NAME: gl.constexpr, number, STAGES: gl.constexpr):
    """Waits until the place of use `number` of `STAGES` places is empty, as the barriers `NAME` (`_BARRIERS`) say."""
    wait_until_empty(shared.barriers, number, STAGES, _index(NAME))


@gluon.jit
def read(shared, NAME: gl.constexpr, place, WARPS: gl.constexpr = 4):
    """Reads the number `NAME` (`_NUMBERS`) from place `place`, in a partition of `WARPS` warps."""
    return read_number(shared.numbers.index(_index(NAME) + place), WARPS)


@gluon.jit
def write(shared, NAME: gl.constexpr, place, number):
    """Writes the number `NAME` to place `place`, in a partition of one warp."""
    write_number(shared.numbers.index(_index(NAME) + place), number)


@gluon.constexpr_function
def first_place(KIND, PLAN):
    """The first place in `BackwardMemory.rows` for `KIND`: "lse", "delta" or one of `PLAN.of_queries`.

    If `KIND` is `None`, it is the number of all places.
    """
    kinds = {} if PLAN.subtracting else {"lse": PLAN.stages, "delta": PLAN.dout_stages}
    kinds |= dict.fromkeys(PLAN.of_queries, PLAN.stages)
    before = len(kinds) if KIND is None else list(kinds).index(KIND)
    return sum(list(kinds.values())[:before])


@gluon.constexpr_function
def plain_layout():
    """The layout in shared memory of float32 numbers in rows, without swizzling."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def result_place(shared, NUMBER: gl.constexpr, TYPE: gl.constexpr, DIM: gl.constexpr):
    """The place of dq of consumer `NUMBER`, reinterpreted as a place for its 64 rows of dk or dv in half precision."""
    return place_as(shared.dq.index(NUMBER), TYPE, [64, DIM], gl.NVMMASharedLayout.get_default_for([64, DIM], TYPE))


@gluon.jit
def weights_place(shared):
    """The place of ds in `backward_wide_products`, as float32 `[16, 256]` for the softmax weights, in register
    order."""
    return place_as(shared.ds.index(0), gl.float32, [16, 256], plain_layout())


@gluon.jit
def finish_turn(shared, taken, T: gl.constexpr, KV_HEADS: gl.constexpr):
    """Called by a consumer at the end of a turn: returns its key tile, batch row and key head.

    They come from shared memory once more, so that no registers hold them through the loops. Then the turn's numbers
    may be overwritten.
    """
    owner = owned(read(shared, "turn", taken % 2), T, KV_HEADS)
    mbarrier.arrive(barrier(shared, "turn_empty", taken % 2), count=1)
    return owner


@gluon.jit
def next_turn(shared, taken, WARPS: gl.constexpr):
    """Waits for turn `taken` of this program, and returns its number; if none is left, `turns.count` or more."""
    wait_for(shared, "turn_full", taken, 2)
    return read(shared, "turn", taken % 2, WARPS)
