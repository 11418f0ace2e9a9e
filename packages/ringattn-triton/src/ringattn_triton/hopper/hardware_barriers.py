# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Hardware barriers: how groups of warps on Hopper let each other go on without shared memory.

Before a thread arrives at a barrier in shared memory, Triton makes all four warps of a group wait for each other, and
often once more afterwards. At a hardware barrier each warp arrives for itself. There are 16 of them. They have no
phases: nobody may arrive a second time before all have arrived once.
"""

from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin

FIRST_FREE = 4
"""Triton takes barriers from 0 on: one to start partitions, and one for each partition of four warps."""


@builtin
def hardware_barrier(ACTION, number, THREADS, _semantic=None):
    """Arrives at a barrier of so many `THREADS`, and waits for the others (`sync`) or goes on at once (`arrive`).

    What a thread read or wrote before it arrives has happened for those who wait.
    """
    action, number, threads = (_unwrap_if_constexpr(x) for x in (ACTION, number, THREADS))
    operands = [] if isinstance(number, int) else [number.handle]
    place = "$1" if operands else str(number)
    constraints = "=r,r,~{memory}" if operands else "=r,~{memory}"
    assembly = f"bar.{action} {place}, {threads}; mov.u32 $0, 0;"
    result = _semantic.builder.get_int32_ty()
    _semantic.builder.create_inline_asm(assembly, constraints, operands, [result], False, 1)
