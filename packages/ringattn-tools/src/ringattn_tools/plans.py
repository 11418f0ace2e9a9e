# SPDX-License-Identifier: Apache-2.0
"""What each strategy of a call would cost: as tables, or as JSON, for `ringattn explain`."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from ringattn_core.call.options import head_sizes
from ringattn_core.errors import InputError
from ringattn_core.placement import platforms

from . import cost, devices
from .analysis import CallAnalysis
from .cost import Cost, Step, total
from .devices import MEASURED, Device, Link, measured_name, rates_of
from .output import Bytes, Rows, Seconds, Title

_HIDES: Final = {True: "yes", False: "no", None: None}


@dataclasses.dataclass(frozen=True)
class Reckoning:
    """The costs of all strategies on a device. `taken` is the cost of the strategy that the call runs with.

    `by_rule`: the call asks for "auto", so a rule chose that strategy.
    """

    device: Device
    plans: tuple[Cost, ...]
    taken: Cost
    by_rule: bool

    @property
    def fastest(self) -> Cost:
        return min((plan for plan in self.plans if plan.refusal is None), key=lambda plan: plan.seconds)


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
    """Makes `parse` a type for `argparse`. On a `ValueError`, the error shows the text and what is `wanted`."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, it needs {wanted}, positive numbers") from None

    return read


def platform_of(arguments: argparse.Namespace) -> str:
    """The platform of `--device` or `--platform`, by default that of this machine. Raises if the two disagree."""
    if not arguments.device:
        return arguments.platform or platforms.platform_of(None, ())
    platform = MEASURED[arguments.device].platform
    if arguments.platform not in (None, platform):
        fact = f"{arguments.device} is a device of {platform}, and --platform is {arguments.platform}"
        raise InputError("--device", fact, "Pass one of them")
    return platform


def reckoning(analysis: CallAnalysis, arguments: argparse.Namespace) -> Reckoning | str:
    """The costs of the analysed call on the device that the command line names.

    If rates or links of the device are unknown, returns a sentence that says which.
    """
    device = _device(analysis, arguments)
    if isinstance(device, str):
        return device
    plans = cost.of_strategies(analysis.work, device, analysis.call.inner, analysis.not_possible)
    taken = next((plan for plan in plans if plan.strategy == analysis.strategy), plans[0])
    return Reckoning(device, plans, taken, arguments.strategy == "auto")


def _device(analysis: CallAnalysis, arguments: argparse.Namespace) -> Device | str:
    """The device with its rates and links, or a sentence that says which are unknown, and which arguments give them.

    Raises if the command line gives only one of `--rate` and `--link`, and the other is unknown.
    """
    here, work = platforms.device_of(None, ()).device_kind, analysis.work
    if analysis.platform != platforms.platform_of(None, ()) or arguments.device not in (None, measured_name(here)):
        here = None
    name = arguments.device or (measured_name(here) if here else None) or f"these {analysis.platform} devices"
    measured, launch, copy = MEASURED.get(name), 0.0, math.inf
    links, host = arguments.link, analysis.call.inner
    if links is None and work.ranks == 1:
        links = (Link("none", math.inf),)
    elif links is None and measured and work.ranks <= measured.host:
        links, host = (measured.link,), measured.host
    rates = arguments.rate, "Kernel rates of the command line; their launches, and copies of sums, take no time"
    if arguments.rate is None:
        rates = rates_of(name, analysis.choice, work.itemsize, max(head_sizes(work.call)), here)
        launch, copy = (measured.launch, measured.copy) if measured else (launch, copy)
    lacking = {"--rate": "kernels"} if rates is None else {}
    lacking |= {"--link": f"links between {work.ranks} ranks"} if links is None else {}
    if rates and links:
        return Device(name, rates[0], links[0], links[-1], host, rates[1], launch, copy)
    missing, unknown = " and ".join(lacking), " or ".join(lacking.values())
    if arguments.rate or arguments.link:
        raise InputError(missing, f"is needed: nobody has measured {unknown} of {name}", "Pass it too")
    return f"Nobody has measured {unknown} of {name}: pass {missing}."


def report(reckoned: Reckoning | str) -> Iterator[Any]:
    """Yields what `show` prints: the costs as headings, tables and sentences, or the sentence that replaces them."""
    if isinstance(reckoned, str):
        yield Title("Plans")
        yield reckoned
        return
    yield Title(f"Plans on {reckoned.device.name}")
    near, far = reckoned.device.near.name, reckoned.device.far.name
    yield f"Reckoned, not measured. {reckoned.device.source}; links: {near if near == far else f'{near}, then {far}'}."
    yield costs(reckoned)
    if len(reckoned.plans) == 1:
        yield "One device needs no plan."
    elif reckoned.by_rule:
        yield _choice(reckoned)
    yield ""
    yield Title("Steps of each plan")
    yield steps(reckoned)


def as_json(reckoned: Reckoning | str) -> dict[str, Any]:
    """The costs as plain data: the tables and the device; if `reckoned` is a sentence, only the sentence."""
    if isinstance(reckoned, str):
        return {"not_reckoned": reckoned}
    return {"plans": costs(reckoned), "steps": steps(reckoned), "device": dataclasses.asdict(reckoned.device)}


def costs(reckoned: Reckoning) -> Rows:
    """One row for each strategy: its times, the bytes that it sends, and its memory, or why the call cannot use it."""

    def row(plan: Cost) -> dict[str, Any]:
        sends = [step for step in plan.steps if step.sent]
        numbers = {
            "forward": Seconds(total(plan.forward)),
            "backward": Seconds(total(plan.backward)),
            "waits": Seconds(plan.waits),
            "hidden": f"{sum(step.hides is True for step in sends)} of {len(sends)}",
            "sent": Bytes(plan.sent),
            "memory": Bytes(plan.memory),
        }
        numbers = numbers if plan.refusal is None else dict.fromkeys(numbers)
        return {"chosen": plan is reckoned.taken, "plan": plan.name, **numbers, "refused": plan.refusal}

    return [row(plan) for plan in reckoned.plans]


def steps(reckoned: Reckoning) -> Rows:
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
    for plan in reckoned.plans:
        for phase in ("forward", "backward"):
            for step in getattr(plan, phase):
                made = row(plan, phase, step)
                kinds.setdefault(_kind(made), []).append(made)
    return [
        alike[0] | {"step": _span(alike[0]["step"], alike[-1]["step"]), "times": len(alike)} for alike in kinds.values()
    ]


def _kind(row: dict[str, Any]) -> tuple[str, ...]:
    """The key by which `steps` joins rows: the printed cells of `row`, without the number of the hop."""
    return tuple(str(value).split()[0] if name == "step" else str(value) for name, value in row.items())


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last.split()[-1]}"


def _choice(reckoned: Reckoning) -> str:
    """Says which strategy "auto" takes, and which one the table shows to be faster, if another is."""
    fastest = reckoned.fastest
    taken = f"strategy='auto' takes {reckoned.taken.name} by its rule"
    if fastest is reckoned.taken:
        return f"{taken}."
    times = f"{Seconds(fastest.seconds)} for both passes, {Seconds(reckoned.taken.seconds)} with {reckoned.taken.name}"
    return f"{taken}. By this table {fastest.name} is faster: {times}."
