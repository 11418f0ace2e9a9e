# SPDX-License-Identifier: Apache-2.0
"""How groups of warps on Hopper wait for each other, and the numbers that they exchange in shared memory.

Barriers are of two kinds. Those in shared memory have phases, which `wait_until_full` and `wait_until_empty` count.
The others are hardware barriers (PTX `bar`), of which there are 16. They have no phases: no warp may arrive a second
time before all have arrived once, and a warp that waits has to wait once for each time that the others arrive. Before a
thread arrives at a barrier in shared memory, Triton makes all four warps of a group wait for each other, and often once
more afterwards. At a hardware barrier each warp arrives for itself, and waiting warps wake earlier.

A plan (`ForwardPlan`, `BackwardPlan`) names its barriers in `hardware_barriers`. A name stands for one barrier for each
stage: that of stage `i` has a number `i` higher than the first.
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
    barrier = "$1" if operands else str(number)
    assembly(f"bar.{action} {barrier}, {threads};", _semantic, *operands)


def assembly(text, semantic, *operands):
    """Inserts PTX that may touch memory. `operands` are `$1`, `$2` and so on; inline assembly must have a result,
    `$0`."""
    constraints = ",".join(["=r", *["r"] * len(operands), "~{memory}"])
    result = semantic.builder.get_int32_ty()
    semantic.builder.create_inline_asm(f"{text} mov.u32 $0, 0;", constraints, list(operands), [result], False, 1)


@gluon.jit
def phase_of(number, STAGES: gl.constexpr):
    """The phase that a stage's barrier in shared memory ends at use `number` (from 0) of `STAGES` stages in turn."""
    return (number // STAGES) & 1


@gluon.jit
def wait_until_full(barriers, number, STAGES: gl.constexpr, FIRST: gl.constexpr = 0):
    """Waits until stage `number % STAGES` holds what use `number` (from 0) loads into it.

    `barriers` has a barrier in shared memory for each stage, from index `FIRST` on: its phase ends when the stage is
    full.
    """
    mbarrier.wait(barriers.index(FIRST + number % STAGES), phase_of(number, STAGES))


@gluon.jit
def wait_until_empty(barriers, number, STAGES: gl.constexpr, FIRST: gl.constexpr = 0):
    """Waits until the stage of use `number` is empty, as before its first use. The phase ends when it is empty."""
    mbarrier.wait(barriers.index(FIRST + number % STAGES), phase_of(number, STAGES) ^ 1)


@gluon.jit
def sync_at(NAME: gl.constexpr, stage, PLAN: gl.constexpr):
    """Arrives at the barrier `NAME` of stage `stage`, and waits until all its threads have arrived."""
    hardware_barrier("sync", number_and_threads(NAME, PLAN)[0] + stage, number_and_threads(NAME, PLAN)[1])


@gluon.jit
def arrive_at(NAME: gl.constexpr, stage, PLAN: gl.constexpr):
    """Arrives at the barrier `NAME` of stage `stage` without waiting."""
    hardware_barrier("arrive", number_and_threads(NAME, PLAN)[0] + stage, number_and_threads(NAME, PLAN)[1])


@gluon.constexpr_function
def number_and_threads(NAME, PLAN):
    """The number of the hardware barrier `NAME` of stage 0, and for how many threads it waits."""
    return PLAN.hardware_barriers[NAME]


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
    return gl.max(place.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)  # the only element, as a scalar
