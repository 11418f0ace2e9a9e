# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
"""Hardware barriers (PTX `bar`) of groups of warps on Hopper, and numbers that groups exchange in shared memory.

Before a thread arrives at a barrier in shared memory, Triton makes all four warps of a group wait for each other, and
often once more afterwards. At a hardware barrier each warp arrives for itself. There are 16 hardware barriers. They
have no phases: no warp may arrive a second time before all have arrived once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin

FIRST_FREE = 4
"""The first hardware barrier that Triton leaves free. Triton takes barriers from 0 on: one for all partitions, and one
for each partition of more than one warp."""


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
def arrive_at(FIRST, place, THREADS, _semantic=None):
    """Arrives, without waiting, at hardware barrier `FIRST` if `place` is 0, else at `FIRST + 1`.

    Both numbers are constants of the instructions. If the number were in a register, the warp would wait until the
    barrier has read the register, which happens only after all earlier stores of the warp.
    """
    first, threads = (_unwrap_if_constexpr(x) for x in (FIRST, THREADS))
    at = _semantic.to_tensor(place).handle
    assembly = (
        f"{{.reg .pred first; setp.eq.s32 first, $1, 0; @first bar.arrive {first}, {threads}; "
        f"@!first bar.arrive {first + 1}, {threads};}} mov.u32 $0, 0;"
    )
    result = _semantic.builder.get_int32_ty()
    _semantic.builder.create_inline_asm(assembly, "=r,r,~{memory}", [at], [result], False, 1)


@gluon.jit
def write_number(place, number):
    """Writes the int32 `number` to a place in shared memory, by a partition of one warp."""
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_number(place, WARPS: gl.constexpr):
    """Reads the int32 in a place in shared memory, in all threads of a partition of `WARPS` warps."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
