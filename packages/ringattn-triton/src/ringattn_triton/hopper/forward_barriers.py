# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""How the warps of a forward program wait for each other, by hardware barriers.

Consumers take turns with the tensor cores: one begins both products of a step when the one before it has begun its own.
Its softmax then falls under the others' products. A barrier in shared memory would wake its warps later.

Consumers also tell the producer that a place is empty, when their products with the place and the reads of their
threads have ended. There is a barrier for each place of `keys`, of `values` and of `turns`, one for the place of
`queries` if there is only one, and one for the place of the values' second piece, the `rest`. With three consumers and
three stages, the last of the 16 barriers is used too. A consumer cannot arrive twice before the producer has waited,
because it reads a place again only after the producer has filled it.
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


@gluon.constexpr_function
def _first(KIND, PLAN):
    """The number of the barrier for the first place of a kind."""
    places = {"keys": PLAN.stages, "values": PLAN.stages, "turns": 2, "queries": 1, "rest": 1}
    kinds = list(places)
    return FIRST_BARRIER.value + PLAN.consumers + sum(places[kind] for kind in kinds[: kinds.index(KIND)])


@gluon.constexpr_function
def _threads(PLAN):
    return 32 + 128 * PLAN.consumers


@gluon.jit
def leave(KIND: gl.constexpr, place, PLAN: gl.constexpr):
    """Tells the producer, as a consumer, that a place is empty. It does not wait."""
    hardware_barrier("arrive", _first(KIND, PLAN) + place, _threads(PLAN))


@gluon.jit
def wait_until_left(KIND: gl.constexpr, place, PLAN: gl.constexpr):
    """Waits, as the producer, until all consumers have left a place."""
    hardware_barrier("sync", _first(KIND, PLAN) + place, _threads(PLAN))
