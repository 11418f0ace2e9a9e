# SPDX-License-Identifier: Apache-2.0
"""Which strategies "auto" takes: by the cost model, the fastest ones that the call and its backend can run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from ..backends.discovery import Registration
from ..contract.call import Call
from ..contract.features import Feature
from ..errors import InputError
from ..placement import axes
from ..placement.platforms import device_of
from ..ring import hops
from ..ring.blocks import static_masks
from ..ring.parcels import joint
from . import STRATEGIES, cost
from .cost import Cost
from .devices import Device, of_kind
from .measured import with_measured
from .ulysses import misfit
from .work import Work, visible_pairs

_NONE: Final[Mapping[str, str]] = {}


def settled(registration: Registration, call: Call) -> tuple[str, str]:
    """The strategies that run the call of one shard: its forward pass alone, and both passes if it is differentiated.

    They differ only for "auto", which takes the strategies of the `fastest` plans, or "ring" on a device for which the
    cost model has no constants. Raises if the call or its backend cannot run the strategy asked for. On one rank every
    strategy becomes "ring". Only shapes and static options decide, so all ranks decide alike. Segment ids, dense masks
    and the caller's positions are unknown while a call is traced; the costs are those of a call in which they mask
    nothing out.
    """
    if call.strategy == "ring":
        return "ring", "ring"
    axis = call.axis_name or ()
    ranks, inner = (axes.size("axis_name", names) for names in (axis, axis[-1:]))
    if ranks == 1:
        return "ring", "ring"
    refusals = checked(registration, call, ranks, inner)
    if call.strategy != "auto":
        return call.strategy, call.strategy
    kind = device_of(None, (call.query, call.key, call.value)).device_kind
    device = of_kind(kind)
    if device is None:
        return "ring", "ring"
    device = with_measured(device, kind, registration.name)
    may_differ = axes.manual().issuperset(axis) and call.bias is None
    plans = reckoned(work_of(registration, call, ranks), device, inner, refusals)
    forward, differentiated = fastest(plans, may_differ)
    return forward.strategy, differentiated.strategy


def checked(registration: Registration, call: Call, ranks: int, inner: int) -> dict[str, str]:
    """The strategies that the backend cannot run, each with the reason. Raises if the call of one shard asks for one.

    It also raises for "ulysses" with heads that the ranks cannot exchange. `inner` is the size of the ring's last axis.
    """
    refusals = refused_by(registration, call.causal, call.layout, inner < ranks)
    if call.strategy == "ulysses":
        why = misfit(call.query.shape[2], inner)
        refusals |= {} if why is None else {"ulysses": why}
    if ranks > 1 and call.strategy in refusals:
        fact = f"{call.strategy!r} cannot run this call: {refusals[call.strategy]}"
        raise InputError("strategy", fact, "Pass 'ring', or 'auto' for what can run it")
    return refusals


def refused_by(registration: Registration | None, causal: bool, layout: str, mixed: bool) -> dict[str, str]:
    """The strategies that a backend cannot run, each with the reason.

    `mixed` says that "ulysses" exchanges heads within groups of ranks, and a ring connects the groups.
    """
    if registration is None:
        return {}
    if registration.descriptor().kernel is None:
        own = f"backend {registration.name!r} drives its own ring"
        return {name: own for name in STRATEGIES if name not in ("ring", "auto")}
    found: dict[str, str] = {}
    if causal and static_masks(registration.implementation()):
        lacking = ("all_gather", "ulysses") if mixed and layout == "striped" else ("all_gather",)
        found |= dict.fromkeys(lacking, f"the kernel of backend {registration.name!r} does not have the masks")
    if not registration.descriptor().supports(Feature.CROSS_LENGTHS):
        found["all_gather"] = f"backend {registration.name!r} needs as many keys as queries"
    return found


def work_of(registration: Registration | None, call: Call, ranks: int) -> Work:
    """The work of the call of one shard, on a ring of `ranks`. Only shapes and static options are read."""
    kernel = None if registration is None or registration.descriptor().kernel is None else registration.implementation()
    bare = dataclasses.replace(
        call.rule, softmax_scale=1.0
    )  # calls that differ only in their scale share cached counts
    shape = call.layout, ranks, call.query.shape[1], call.key.shape[1]
    return Work.of_call(call, hops.plan(bare, *shape, joint=joint(kernel)), visible_pairs(bare, *shape))


def reckoned(
    work: Work, device: Device, inner: int | None = None, refusals: Mapping[str, str] = _NONE
) -> tuple[Cost, ...]:
    """The cost of every plan of a call, also of plans that are refused.

    A plan that the call or its backend cannot run has a refusal and no steps. A plan that needs more memory than the
    device has gets a refusal too, and keeps its steps.

    `inner` is the size of the last axis of the ring; by default all ranks are one group. "ring" then has two levels,
    and "ulysses" exchanges heads for tokens within groups of `inner` ranks. `refusals` gives the strategies that the
    backend cannot run, each with the reason.
    """
    plans = [cost.ring(dataclasses.replace(work, plan=work.plan.over(inner or work.ranks)), device)]
    if work.ranks > 1:
        others = [cost.all_gather(work, device), cost.ulysses(work, device, inner or work.ranks)]
        plans += [
            Cost(plan.strategy, plan.inner, (), (), 0, refusals[plan.strategy]) if plan.strategy in refusals else plan
            for plan in others
        ]
    return tuple(_fitting(plan, device) for plan in plans)


def fastest(plans: Sequence[Cost], may_differ: bool) -> tuple[Cost, Cost]:
    """The plan with the shortest forward pass, and that with the shortest forward and backward pass together.

    Unless they `may_differ`, both are the second one. They must not differ for a call with a bias: `by_need` hides from
    the engine whether the bias is differentiated, so its gradient would always be computed. Nor may they where a `vmap`
    plays the ranks: inside `by_need`, JAX cannot transpose the exchange of heads there.

    Of equal plans the first one is taken. If no plan fits in memory, both are the plan that needs the least memory,
    because the model may be wrong.
    """
    usable = [plan for plan in plans if plan.refusal is None]
    if not usable:
        possible = [plan for plan in plans if plan.steps]
        usable = [min(possible, key=lambda plan: plan.memory)]
    both = min(usable, key=lambda plan: plan.seconds)
    forward = min(usable, key=lambda plan: cost.total(plan.forward))
    return (forward if may_differ else both), both


def by_name(plans: Sequence[Cost], name: str) -> Cost:
    """The plan of this strategy. On one device there is one plan for all strategies."""
    return next((plan for plan in plans if plan.strategy == name), plans[0])


def _fitting(plan: Cost, device: Device) -> Cost:
    """The plan, with a refusal if it needs more memory than the device has."""
    if plan.refusal is not None or plan.memory <= device.memory:
        return plan
    fact = f"needs {plan.memory / 2**30:.1f} GiB, and the device has {device.memory / 2**30:.1f}"
    return dataclasses.replace(plan, refusal=fact)
