# SPDX-License-Identifier: Apache-2.0
"""Which plan runs a call: the cheapest that the call allows, by the cost model."""

import dataclasses
from collections.abc import Sequence

from ..errors import InputError
from . import STRATEGIES, cost
from .cost import Cost
from .devices import Device
from .work import Work


def reckoned(work: Work, device: Device, inner: int | None = None, own_ring: str | None = None) -> tuple[Cost, ...]:
    """The cost of every plan of a call, those that it cannot use among them.

    `inner` is the number of ranks of the last axis of the ring, by default all of them: these would exchange heads for
    tokens. `own_ring` is the name of a backend that drives its own ring.
    """
    plans = [cost.ring(work, device)]
    if work.ranks > 1:
        others = [cost.all_gather(work, device), cost.ulysses(work, device, inner or work.ranks)]
        own = None if own_ring is None else f"backend {own_ring!r} drives its own ring"
        plans += [dataclasses.replace(plan, refusal=own or plan.refusal) for plan in others]
    return tuple(_fitting(plan, device) for plan in plans)


def cheapest(plans: Sequence[Cost]) -> Cost:
    """The plan with the least time for a forward and a backward pass; of equal ones the first.

    If the call can use none of them, the one that needs the least memory: the model may be wrong.
    """
    usable = [plan for plan in plans if plan.refusal is None]
    if usable:
        return min(usable, key=lambda plan: plan.seconds)
    return min((plan for plan in plans if plan.steps), key=lambda plan: plan.memory)


def by_name(plans: Sequence[Cost], name: str) -> Cost:
    """The first plan of this name; for "auto" the cheapest. Raises for an unknown name."""
    if name == "auto":
        return cheapest(plans)
    if name not in STRATEGIES:
        known = ", ".join(repr(x) for x in (*STRATEGIES, "auto"))
        raise InputError("strategy", f"got {name!r}", f"Known strategies: {known}")
    return next((plan for plan in plans if plan.strategy == name), plans[0])


def _fitting(plan: Cost, device: Device) -> Cost:
    if plan.refusal is not None or plan.memory <= device.memory:
        return plan
    fact = f"needs {plan.memory / 2**30:.1f} GiB, and the device has {device.memory / 2**30:.1f}"
    return dataclasses.replace(plan, refusal=fact)
