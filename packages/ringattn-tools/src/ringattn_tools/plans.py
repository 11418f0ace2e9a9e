# SPDX-License-Identifier: Apache-2.0
"""What each strategy of a call would cost: as tables, or as JSON, for `ringattn explain`."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

from ringattn_core.errors import InputError
from ringattn_core.placement import platforms

from . import cost, devices
from .analysis import CallAnalysis
from .cost import Cost, Step, total
from .devices import MEASURED, Device, Question, measured_name
from .output import Bytes, Rows, Seconds, Title

_HIDES: Final = {True: "yes", False: "no", None: None}


@dataclasses.dataclass(frozen=True)
class Reckoning:
    """The costs of all strategies on a device. `taken` is that of the strategy which the call takes."""

    device: Device
    plans: tuple[Cost, ...]
    taken: Cost
    by_rule: bool


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plans", "what each strategy costs, from measured rates or those given here")
    group.add_argument(
        "--device", choices=MEASURED, metavar="NAME", help=f"a kind of device that was measured: {', '.join(MEASURED)}"
    )
    group.add_argument(
        "--rate", type=_read("FORWARD,BACKWARD", devices.parsed_rate), metavar="FORWARD,BACKWARD",
        help="the kernels' rates for this call on one device, in 10^12 floating-point operations a second",
    )  # fmt: skip
    group.add_argument(
        "--link", type=_read("LINK or NEAR,FAR", devices.parsed_links), metavar="LINK[,FAR]",
        help="what one rank sends: nvlink, or GB/s, or GB/s@LATENCY in microseconds; of two links, the first connects "
        "the ranks of the last axis, the second all others",
    )  # fmt: skip
    group.add_argument(
        "--inner", type=int, metavar="U",
        help="ranks of the last of two axes of the ring: inner rings, or groups that exchange heads for tokens",
    )  # fmt: skip


def _read(wanted: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` as a type of `argparse`: text that it cannot read is named, with what is `wanted`."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, it needs {wanted}, positive numbers") from None

    return read


def platform_of(arguments: argparse.Namespace) -> str:
    """The platform that the command line names; by default that of this machine."""
    if not arguments.device:
        return arguments.platform or platforms.platform_of(None, ())
    platform = MEASURED[arguments.device].platform
    if arguments.platform not in (None, platform):
        fact = f"{arguments.device} is a device of {platform}, and --platform is {arguments.platform}"
        raise InputError("--device", fact, "Pass one of them")
    return platform


def reckoning(found: CallAnalysis, arguments: argparse.Namespace) -> Reckoning | str:
    """The costs of the analysed call on the device of the command line, or a sentence about what is not known of it."""
    here = platforms.device_of(None, ()).device_kind
    if found.platform != platforms.platform_of(None, ()) or arguments.device not in (None, measured_name(here)):
        here = None
    work = found.work
    device = devices.reckoned(
        Question(
            device=arguments.device or (measured_name(here) if here else None) or f"these {found.platform} devices",
            here=here,
            backend=found.choice,
            itemsize=work.itemsize,
            head_dim=max(work.head_dim, work.value_dim),
            ranks=work.ranks,
            inner=found.call.inner,
            rate=arguments.rate,
            link=arguments.link,
        )
    )
    if isinstance(device, str):
        return device
    plans = cost.of_strategies(work, device, found.call.inner, found.not_possible)
    taken = next((plan for plan in plans if plan.strategy == found.strategy), plans[0])
    return Reckoning(device, plans, taken, arguments.strategy == "auto")


def report(found: Reckoning | str) -> Iterator[Any]:
    """Headings, tables and sentences for `show`."""
    if isinstance(found, str):
        yield Title("Plans")
        yield found
        return
    yield Title(f"Plans on {found.device.name}")
    near, far = found.device.near.name, found.device.far.name
    yield f"Reckoned, not measured. {found.device.source}; links: {near if near == far else f'{near}, then {far}'}."
    yield costs(found)
    if len(found.plans) == 1:
        yield "One device needs no plan."
    elif found.by_rule:
        yield _choice(found)
    listed = steps(found)
    if listed:
        yield ""
        yield Title("Steps of each plan")
        yield listed


def as_json(found: Reckoning | str) -> dict[str, Any]:
    """Plain data: the tables, and the rates and links; without a device only why there are none."""
    if isinstance(found, str):
        return {"not_reckoned": found}
    return {"plans": costs(found), "steps": steps(found), "device": dataclasses.asdict(found.device)}


def costs(found: Reckoning) -> Rows:
    """One row for each strategy: its times, what it sends, its memory, and why the call cannot use it."""

    def row(plan: Cost) -> dict[str, Any]:
        sends = [step for step in plan.steps if step.sent]
        usable = plan.refusal is None
        return {
            "chosen": plan is found.taken,
            "plan": plan.name,
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
    """One row for each kind of step of each strategy that the call can use: steps with equal cells share a row."""

    def row(plan: Cost, phase: str, step: Step) -> dict[str, Any]:
        return {
            "plan": plan.name,
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
            for step in getattr(plan, phase):
                made = row(plan, phase, step)
                kinds.setdefault(_kind(made), []).append(made)
    return [
        alike[0] | {"step": _span(alike[0]["step"], alike[-1]["step"]), "times": len(alike)} for alike in kinds.values()
    ]


def _kind(row: dict[str, Any]) -> tuple[str, ...]:
    """The printed cells of a row, without the number of the hop."""
    return tuple(str(value).split()[0] if name == "step" else str(value) for name, value in row.items())


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last.split()[-1]}"


def _choice(found: Reckoning) -> str:
    """A sentence about the strategy that "auto" takes."""
    fastest = min((plan for plan in found.plans if plan.refusal is None), key=lambda plan: plan.seconds)
    taken = f"strategy='auto' takes {found.taken.name} by its rule"
    if fastest is found.taken:
        return f"{taken}."
    times = f"{Seconds(fastest.seconds)} for both passes, {Seconds(found.taken.seconds)} with {found.taken.name}"
    return f"{taken}. By this table {fastest.name} is faster: {times}."
