# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""The hardware barriers by which the consumers of a forward program tell its producer that a place is empty.

Their numbers follow those of `order`: one for each place of keys, of values and of turns, one for the place of queries
if there is only one, and one for the place of the values' second piece. With three consumers and three stages, the last
of the 16 barriers is used too.

A consumer arrives when it no longer reads the place: its products with the place have ended, and so have the reads of
its threads (`hardware_barriers`). It cannot arrive twice before the producer has waited, because it reads a place again
only after the producer has filled it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hardware_barriers import hardware_barrier
from .order import FIRST_BARRIER


@gluon.constexpr_function
def k_empty(PLAN):
    return FIRST_BARRIER.value + PLAN.consumers


@gluon.constexpr_function
def v_empty(PLAN):
    return FIRST_BARRIER.value + PLAN.consumers + PLAN.stages


@gluon.constexpr_function
def turn_empty(PLAN):
    return FIRST_BARRIER.value + PLAN.consumers + 2 * PLAN.stages


@gluon.constexpr_function
def q_empty(PLAN):
    return FIRST_BARRIER.value + PLAN.consumers + 2 * PLAN.stages + 2


@gluon.constexpr_function
def rest_empty(PLAN):
    return FIRST_BARRIER.value + PLAN.consumers + 2 * PLAN.stages + 3


@gluon.constexpr_function
def _threads(PLAN):
    return 32 + 128 * PLAN.consumers


@gluon.jit
def leave(number, PLAN: gl.constexpr):
    """Tells the producer, as a consumer, that a place is empty. It does not wait."""
    hardware_barrier("arrive", number, _threads(PLAN))


@gluon.jit
def wait_until_left(number, PLAN: gl.constexpr):
    """Waits, as the producer, until all consumers have left a place."""
    hardware_barrier("sync", number, _threads(PLAN))
