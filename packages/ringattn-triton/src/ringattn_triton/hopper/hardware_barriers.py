# SPDX-License-Identifier: Apache-2.0
"""Hardware barriers (PTX `bar`) of groups of warps on Hopper, and numbers that groups exchange in shared memory.

Before a thread arrives at a barrier in shared memory, Triton makes all four warps of a group wait for each other, and
often once more afterwards. At a hardware barrier each warp arrives for itself, and waiting warps wake earlier. There
are 16 hardware barriers. They have no phases: no warp may arrive a second time before all have arrived once.

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


@builtin
def arrive_at_either(FIRST, place, THREADS, _semantic=None):
    """Arrives, without waiting, at hardware barrier `FIRST` if `place` is 0, else at `FIRST + 1`."""
    first, threads = (_unwrap_if_constexpr(x) for x in (FIRST, THREADS))
    at = _semantic.to_tensor(place).handle
    assembly = (
        f"{{.reg .pred first; setp.eq.s32 first, $1, 0; @first bar.arrive {first}, {threads}; "
        f"@!first bar.arrive {first + 1}, {threads};}} mov.u32 $0, 0;"
    )
    result = _semantic.builder.get_int32_ty()
    _semantic.builder.create_inline_asm(assembly, "=r,r,~{memory}", [at], [result], False, 1)


@gluon.jit
def wait_at(NAME: gl.constexpr, place, PLAN: gl.constexpr):
    """Arrives at the barrier `NAME` of place `place`, and waits until all its threads have arrived."""
    hardware_barrier("sync", _first(NAME, PLAN) + place, _threads(NAME, PLAN))


@gluon.jit
def arrive_at(NAME: gl.constexpr, place, PLAN: gl.constexpr):
    """Arrives at the barrier `NAME` of place `place` without waiting."""
    hardware_barrier("arrive", _first(NAME, PLAN) + place, _threads(NAME, PLAN))


@gluon.jit
def arrive_at_constant(NAME: gl.constexpr, place, PLAN: gl.constexpr, FROM: gl.constexpr = 0):
    """`arrive_at` for place `FROM + place`, where `place` is 0 or 1, by two instructions with constant numbers.

    If the number were in a register, the warp would wait until the barrier has read the register, which happens only
    after all earlier stores of the warp.
    """
    arrive_at_either(_first(NAME, PLAN) + FROM, place, _threads(NAME, PLAN))


@gluon.constexpr_function
def _first(NAME, PLAN):
    return PLAN.hardware_barriers[NAME][0]


@gluon.constexpr_function
def _threads(NAME, PLAN):
    return PLAN.hardware_barriers[NAME][1]


@builtin
def softmax_first(step, _semantic=None):
    """Keeps the assembler from placing the wait for the last tile's weighted values before the exponentials.

    The assembler places that wait as early as it may, but not before a preceding barrier instruction, and it places
    barrier instructions late. So this function adds a barrier arrival that is never executed, because no `step` is
    negative.
    """
    at, result = _semantic.to_tensor(step).handle, _semantic.builder.get_int32_ty()
    assembly = "{ .reg .pred p; setp.lt.s32 p, $1, 0; @p bar.arrive 15, 288; } mov.u32 $0, 0;"
    _semantic.builder.create_inline_asm(assembly, "=r,r,~{memory}", [at], [result], False, 1)


@gluon.jit
def after_barriers(x, tiles):
    """Returns `x`, and keeps the assembler from using it before the preceding barrier instructions.

    The assembler moves barrier instructions down past arithmetic, but moves no read of shared memory up past a barrier.
    So the result depends on such a read: of the number of a key tile, which is never negative.
    """
    return gl.where(read_number(tiles.index(0), 4) >= 0, x, 0.0)


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
