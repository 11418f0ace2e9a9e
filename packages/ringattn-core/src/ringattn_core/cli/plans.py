# SPDX-License-Identifier: Apache-2.0
"""What each plan of a call would cost, by the cost model: as tables, or as JSON, for `ringattn explain`."""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from ..backends import discovery
from ..errors import InputError
from ..placement import platforms
from ..strategies import choose, devices
from ..strategies.cost import Cost, Step, total
from ..strategies.devices import DEVICES, LINKS, TYPICAL, Device
from ..strategies.measured import with_measured
from .analysis import CallAnalysis
from .output import Bytes, Rows, Seconds, Title

_HIDES: Final = {True: "yes", False: "no", None: None}


@dataclasses.dataclass(frozen=True)
class Reckoning:
    """The costs of all plans on a device.

    The call asks for the plan `asked`. "auto" would take the plan `auto` for a call that is differentiated, and
    `auto_forward` for one that is not. It chooses while a call is traced, when documents are unknown, and counts pairs
    of queries and keys. The costs of `plans` count documents and whole tiles, so by them another plan may be faster.
    """

    device: Device
    plans: tuple[Cost, ...]
    asked: Cost
    auto_forward: Cost
    auto: Cost


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plans", "what each plan costs, by a model")
    group.add_argument(
        "--device", choices=DEVICES, metavar="NAME", help=f"the kind of device, here or not: {', '.join(DEVICES)}"
    )
    group.add_argument("--link", choices=LINKS, help="what connects the ranks; by default what the device usually has")
    group.add_argument(
        "--inner", type=int, metavar="U",
        help="ranks of the last of two axes of the ring: inner rings, or groups that exchange heads for tokens",
    )  # fmt: skip


def device_of(arguments: argparse.Namespace) -> tuple[str, Device | None]:
    """The platform and the device that the command line names; by default those of this machine.

    A platform that this machine does not have gets a typical device, or `None` if the model has no constants for it.
    """
    here = platforms.platform_of(None, ())
    if arguments.device:
        device = DEVICES[arguments.device]
        if arguments.platform not in (None, device.platform):
            fact = f"{device.name} is a device of {device.platform}, and --platform is {arguments.platform}"
            raise InputError("--device", fact, "Pass one of them")
    elif arguments.platform in (None, here):
        device = devices.of_kind(platforms.device_of(None, ()).device_kind)
    else:
        device = DEVICES.get(TYPICAL.get(arguments.platform, ""))
    platform = arguments.platform or (device.platform if arguments.device and device else here)
    return platform, device.linked_by(LINKS[arguments.link]) if device and arguments.link else device


def reckoning(found: CallAnalysis, device: Device, strategy: str) -> Reckoning:
    """The costs of the analysed call on the device, with rates from tuning if the device is this machine's."""
    chosen, options = None if found.choice is None else discovery.get(found.choice), found.call.options
    inner = found.call.inner
    mixed = inner < found.ranks
    kind = platforms.device_of(None, ()).device_kind
    here = devices.of_kind(kind)
    if here is not None and here.name == device.name:
        device = with_measured(device, kind, found.choice)
    refusals = choose.refused_by(chosen, options.get("causal", False), options["layout"], mixed)
    plans = choose.reckoned(found.for_plans, device, inner, refusals)
    call = found.shard.call
    as_traced = choose.reckoned(choose.work_of(chosen, call, found.ranks), device, inner, refusals)
    auto = [choose.by_name(plans, plan.strategy) for plan in choose.fastest(as_traced, may_differ=call.bias is None)]
    return Reckoning(device, plans, auto[1] if strategy == "auto" else choose.by_name(plans, strategy), *auto)


def report(found: Reckoning) -> Iterator[Any]:
    """Headings, tables and sentences for `show`."""
    yield Title(f"Plans on {found.device.name}")
    yield f"By a model, not measured. {found.device.source}."
    yield costs(found)
    yield _choice(found)
    listed = steps(found)
    if listed:
        yield ""
        yield Title("Steps of each plan")
        yield listed


def as_json(found: Reckoning) -> dict[str, Any]:
    """Plain data: the tables, the constants, and what "auto" takes."""
    device = {**vars(found.device), "near": vars(found.device.near), "far": vars(found.device.far)}
    auto = {"auto": _name(found.auto), "auto_forward": _name(found.auto_forward)}
    return {"plans": costs(found), "steps": steps(found), **auto, "device": device}


def no_constants(platform: str) -> Iterator[Any]:
    yield Title("Plans")
    yield f"There are no constants for these {platform} devices. --device takes {', '.join(DEVICES)}."


def costs(found: Reckoning) -> Rows:
    """One row for each plan: its times, what it sends, its memory, and why the call cannot use it."""

    def row(plan: Cost) -> dict[str, Any]:
        sends = [step for step in plan.steps if step.sent]
        usable = bool(plan.steps)
        return {
            "chosen": plan is found.asked,
            "plan": _name(plan),
            "forward": Seconds(total(plan.forward)) if usable else None,
            "backward": Seconds(total(plan.backward)) if usable else None,
            "waits": Seconds(plan.waits) if usable else None,
            "hidden": f"{sum(step.hides is True for step in sends)} of {len(sends)}" if usable else None,
            "sent": Bytes(plan.sent) if usable else None,
            "memory": Bytes(plan.memory) if usable else None,
            "refused": plan.refusal,
        }

    return [row(plan) for plan in found.plans]


def steps(found: Reckoning) -> Rows:
    """One row for each kind of step of each plan that the call can use: steps with equal cells share a row."""

    def row(plan: Cost, phase: str, step: Step) -> dict[str, Any]:
        return {
            "plan": _name(plan),
            "pass": phase,
            "step": step.name,
            "times": 1,
            "computes": Seconds(step.computes + step.beside),
            "sent": Bytes(step.sent) if step.sent else None,
            "sends": Seconds(step.sends) if step.sent else None,
            "hides": _HIDES[step.hides],
        }

    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for plan in found.plans:
        for phase in ("forward", "backward"):
            for step in getattr(plan, phase) if plan.refusal is None else ():
                made = row(plan, phase, step)
                kinds.setdefault(_kind(made), []).append(made)
    return [
        alike[0] | {"step": _span(alike[0]["step"], alike[-1]["step"]), "times": len(alike)} for alike in kinds.values()
    ]


def _kind(row: dict[str, Any]) -> tuple[str, ...]:
    """The printed cells of a row, without the number of the hop or round."""
    return tuple(str(value).split()[0] if name == "step" else str(value) for name, value in row.items())


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last.split()[-1]}"


def _choice(found: Reckoning) -> str:
    """One or two sentences about the plan that "auto" takes."""
    if len(found.plans) == 1:
        return "One device needs no plan."
    asked, auto = found.asked, found.auto
    if auto.refusal:
        return f"No plan fits; strategy='auto' takes {_name(auto)}, which needs the least memory."
    taken = f"strategy='auto' takes {_name(auto)}"
    if found.auto_forward is not auto:
        taken += f" with gradients, and {_name(found.auto_forward)} for a forward pass alone"
    if auto is not asked and not asked.refusal:
        times = f"{Seconds(auto.seconds)} with {_name(auto)}, {Seconds(asked.seconds)} with {_name(asked)}"
        taken += f". Both passes take {times}"
    faster = min((plan for plan in found.plans if plan.refusal is None), key=lambda plan: plan.seconds)
    if faster.seconds < auto.seconds:
        taken += f". By the table above, which counts documents and whole tiles, {_name(faster)} is faster"
    return f"{taken}."


def _name(plan: Cost) -> str:
    """The name of a plan; of "ulysses" with the size of the groups that exchange heads."""
    return f"ulysses of {plan.inner}" if plan.strategy == "ulysses" else plan.strategy
