# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""The hardware barriers by which the consumers of a forward program tell its producer that a place is empty.

Their numbers follow those of `order`: one for each place of `keys`, of `values` and of `turns`, one for the place of
`queries` if there is only one, and one for the place of the values' second piece, the `rest`. With three consumers and
three stages, the last of the 16 barriers is used too.

A consumer arrives when it no longer reads the place: its products with the place have ended, and so have the reads of
its threads (`hardware_barriers`). It cannot arrive twice before the producer has waited, because it reads a place again
only after the producer has filled it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hardware_barriers import hardware_barrier
from .order import FIRST_BARRIER


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
