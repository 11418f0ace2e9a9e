# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false
"""How the warps of a forward program wait for each other, by hardware barriers.

Consumers use the tensor cores in rotation: a consumer begins both products of a step when the consumer before it has
begun its own. Its softmax then overlaps with the products of the others. A barrier in shared memory would wake the
waiting warps later.

A consumer also tells the producer that a place in shared memory is empty, when its products with the place and its
threads' reads have ended. There is a barrier for each place of `keys`, of `values` and of `turns`, one for the place of
`queries` if there is only one, and one for the place of the values' second piece, the `rest`. With three consumers and
three stages, the last of the 16 barriers is used too. A consumer cannot arrive twice before the producer has waited,
because it reads a place again only after the producer has filled the place again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from .hardware_barriers import FIRST_FREE, hardware_barrier, read_number

FIRST_BARRIER: gl.constexpr = gl.constexpr(FIRST_FREE + 1)
"""The number of the first consumer's hardware barrier. It is one more than `FIRST_FREE`, because a forward program may
have one more partition."""


@gluon.jit
def wait_for_order(NUMBER: gl.constexpr):
    """Waits until consumer `NUMBER` may begin its products on the tensor cores (`pass_order` lets it)."""
    hardware_barrier("sync", FIRST_BARRIER + NUMBER, 256)


@gluon.jit
def pass_order(NUMBER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the consumer after consumer `NUMBER` begin its products on the tensor cores."""
    hardware_barrier("arrive", FIRST_BARRIER + (NUMBER + 1) % CONSUMERS, 256)


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


@gluon.constexpr_function
def _first(KIND, PLAN):
    """The hardware barrier for the first place of `KIND`, such as "keys"; its other places have the next ones."""
    places = {"keys": PLAN.stages, "values": PLAN.stages, "turns": 2, "queries": 1, "rest": 1}
    kinds = list(places)
    return FIRST_BARRIER.value + PLAN.consumers + sum(places[kind] for kind in kinds[: kinds.index(KIND)])


@gluon.constexpr_function
def _threads(PLAN):
    return 32 + 128 * PLAN.consumers


@gluon.jit
def leave(KIND: gl.constexpr, place, PLAN: gl.constexpr):
    """Called by a consumer: tells the producer, without waiting, that this consumer is done with a place of `KIND`."""
    hardware_barrier("arrive", _first(KIND, PLAN) + place, _threads(PLAN))


@gluon.jit
def wait_until_left(KIND: gl.constexpr, place, PLAN: gl.constexpr):
    """Called by the producer: waits until all consumers have called `leave` for place number `place` of `KIND`."""
    hardware_barrier("sync", _first(KIND, PLAN) + place, _threads(PLAN))
