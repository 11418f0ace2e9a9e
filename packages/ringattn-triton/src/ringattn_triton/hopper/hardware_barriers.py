# SPDX-License-Identifier: Apache-2.0
"""How groups of warps on Hopper wait for each other, and the numbers that they exchange in shared memory.

Barriers are of two kinds. Those in shared memory have phases, which `wait_until_full` and `wait_until_empty` count.
The others are hardware barriers (PTX `bar`), of which there are 16. They have no phases: no warp may arrive a second
time before all have arrived once. Before a thread arrives at a barrier in shared memory, Triton makes all four warps of
a group wait for each other, and often once more afterwards. At a hardware barrier each warp arrives for itself, and
waiting warps wake earlier.

A plan (`ForwardPlan`, `BackwardPlan`) names its barriers in `hardware_barriers`. A name stands for one barrier for each
place: that of place `i` has a number `i` higher than the first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@builtin
def hardware_barrier(ACTION, number, THREADS, _semantic=None):
    """Arrives at hardware barrier `number`, which waits for `THREADS` threads in all.

    If `ACTION` is "sync", it waits until all of them have arrived; if "arrive", it goes on at once. All reads and
    writes of a thread before it arrives are complete when the waiting threads go on.
    """
    action, number, threads = (_unwrap_if_constexpr(x) for x in (ACTION, number, THREADS))
    operands = [] if isinstance(number, int) else [number.handle]
    place = "$1" if operands else str(number)
    constraints = "=r,r,~{memory}" if operands else "=r,~{memory}"
    assembly = f"bar.{action} {place}, {threads}; mov.u32 $0, 0;"
    result = _semantic.builder.get_int32_ty()
    _semantic.builder.create_inline_asm(assembly, constraints, operands, [result], False, 1)


@gluon.jit
def phase_of(number, STAGES: gl.constexpr):
    """The phase that a place's barrier in shared memory ends at use `number` (from 0) of `STAGES` places in turn."""
    return (number // STAGES) & 1


@gluon.jit
def wait_until_full(barriers, number, STAGES: gl.constexpr, FIRST: gl.constexpr = 0):
    """Waits until place `number % STAGES` holds what use `number` (from 0) loads into it.

    `barriers` has a barrier in shared memory for each place, from index `FIRST` on: its phase ends when the place is
    full.
    """
    mbarrier.wait(barriers.index(FIRST + number % STAGES), phase_of(number, STAGES))


@gluon.jit
def wait_until_empty(barriers, number, STAGES: gl.constexpr, FIRST: gl.constexpr = 0):
    """Waits until the place of use `number` is empty, as before its first use. The phase ends when it is empty."""
    mbarrier.wait(barriers.index(FIRST + number % STAGES), phase_of(number, STAGES) ^ 1)


@gluon.jit
def sync_at(NAME: gl.constexpr, place, PLAN: gl.constexpr):
    """Arrives at the barrier `NAME` of place `place`, and waits until all its threads have arrived."""
    hardware_barrier("sync", first_number(NAME, PLAN) + place, threads_of(NAME, PLAN))


@gluon.jit
def arrive_at(NAME: gl.constexpr, place, PLAN: gl.constexpr):
    """Arrives at the barrier `NAME` of place `place` without waiting."""
    hardware_barrier("arrive", first_number(NAME, PLAN) + place, threads_of(NAME, PLAN))


@gluon.constexpr_function
def first_number(NAME, PLAN):
    """The number of the hardware barrier `NAME` of place 0."""
    return PLAN.hardware_barriers[NAME][0]


@gluon.constexpr_function
def threads_of(NAME, PLAN):
    """For how many threads the hardware barrier `NAME` waits."""
    return PLAN.hardware_barriers[NAME][1]


@gluon.jit
def begin(barriers, COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1, FIRST: gl.constexpr = 0):
    """Initialises `COUNT` barriers in shared memory from index `FIRST` on; `ARRIVALS` arrivals complete a phase."""
    for number in gl.static_range(COUNT):
        mbarrier.init(barriers.index(FIRST + number), count=ARRIVALS)


@gluon.jit
def write_number(place, number):
    """Writes the int32 `number` to a place in shared memory, by a partition of one warp."""
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_number(place, WARPS: gl.constexpr):
    """Reads the int32 in a place in shared memory, in all threads of a partition of `WARPS` warps."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
