# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""How the consumers of a program on Hopper take turns with the tensor cores.

A consumer begins both products of a step when the one before it has begun both of its own. Its softmax then falls under
the others' products. The order changes no result. A barrier in shared memory would do the same, but
wake its warps later.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .hardware_barriers import FIRST_FREE, hardware_barrier

FIRST_BARRIER: gl.constexpr = gl.constexpr(FIRST_FREE + 1)
"""The number of the first consumer's hardware barrier. A forward program may have one more partition, hence the 1."""


@gluon.jit
def wait_for_order(NUMBER: gl.constexpr):
    """Waits until it is this consumer's time to multiply."""
    hardware_barrier("sync", FIRST_BARRIER + NUMBER, 256)


@gluon.jit
def pass_order(NUMBER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the next consumer multiply."""
    hardware_barrier("arrive", FIRST_BARRIER + (NUMBER + 1) % CONSUMERS, 256)


@builtin
def softmax_first(step, _semantic=None):
    """Keeps the assembler from waiting for the weighted values of the last tile before it takes exponentials.

    It places that wait as early as it may, which is never before the next barrier instruction, and it places barrier
    instructions late. So this adds an arrival that is never executed, because no `step` is negative.
    """
    at, result = _semantic.to_tensor(step).handle, _semantic.builder.get_int32_ty()
    assembly = "{ .reg .pred p; setp.lt.s32 p, $1, 0; @p bar.arrive 15, 288; } mov.u32 $0, 0;"
    _semantic.builder.create_inline_asm(assembly, "=r,r,~{memory}", [at], [result], False, 1)
