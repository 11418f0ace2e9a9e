# SPDX-License-Identifier: Apache-2.0
"""How many tokens a chip needs to hide its sends, and what share of the kernels' rate 1,024 chips and more keep.

By the cost model of `ringattn explain`, for one causal sequence in zigzag order over all chips. With `--measured`,
the program fits the rates of kernels, and the fixed time of a call, to one GPU alone in what `gpu_ring.py` printed, and
compares the model with the strategies that were measured there. Without it, all numbers are constants of the model.
Needs no accelerator.
"""

import argparse
import bisect
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ringattn_core.contract.rule import Rule
from ringattn_core.ring import hops
from ringattn_core.strategies import choose
from ringattn_core.strategies.cost import total
from ringattn_core.strategies.devices import DEVICES, Device, of_kind
from ringattn_core.strategies.work import Work, visible_pairs

HEADER = re.compile(r"^gpu_ring\.py: jax [^,]*, (.*), (\d+) device\(s\)")
ROW = re.compile(r"^(\d+) tokens, (forward|forward\+backward): (\w+), TFLOP/s of a GPU +([\d.]+)$")
OF_RUN = (16, 16, 128)
"""Query heads, key heads and head size of `gpu_ring.py` by default."""
PASSES = {"forward": 1.0, "forward+backward": 3.5}
"""The parts of `gpu_ring.py`, with the products of matrices in each over those of a forward pass."""
TOKENS = tuple(2**power for power in range(8, 18))
LENGTHS = range(256, TOKENS[-1] + 1, 256)


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run of `gpu_ring.py` measured on `ranks` GPUs of this `kind`.

    `rates` are TFLOP/s of a GPU by the number of tokens, the part (forward or both passes) and who ran it. A GPU alone
    had the tokens of one rank.
    """

    kind: str
    ranks: int
    rates: dict[tuple[int, str, str], float] = dataclasses.field(default_factory=dict)

    def fitted(self, part: str) -> tuple[float, float]:
        """The fixed seconds of a call, and the operations a second of its kernels, from one GPU alone.

        They fit the times at all lengths with the least squares of relative errors. With a single length, or where the
        fit would be negative, the fixed time is 0.
        """
        alone = [(tokens, rate) for (tokens, name, who), rate in self.rates.items() if (name, who) == (part, "alone")]
        counts = [operations((tokens // self.ranks) ** 2 / 2, part) for tokens, _ in alone]
        seconds = [count / (1e12 * rate) for count, (_, rate) in zip(counts, alone, strict=True)]
        terms = np.array([(1 / time, count / time) for count, time in zip(counts, seconds, strict=True)])
        call, each = np.linalg.lstsq(terms, np.ones(len(terms)))[0] if len(terms) > 1 else (-1.0, 0.0)
        if call < 0:
            call, (each,) = 0.0, np.linalg.lstsq(terms[:, 1:], np.ones(len(terms)))[0]
        return float(call), 1 / float(each)

    def device(self, base: Device) -> Device:
        """The device with the kernel rates of this run."""
        forward, both = (self.fitted(part)[1] for part in PASSES)
        backward = 2.5 / (3.5 / both - 1 / forward)
        return dataclasses.replace(base, rates={OF_RUN[2]: (forward, backward)})


def operations(pairs: float, part: str) -> float:
    """The operations of the kernels of `gpu_ring.py` for so many pairs of a query and a key."""
    heads, _, dim = OF_RUN
    return PASSES[part] * 4 * heads * dim * pairs


def runs(text: str) -> list[Run]:
    """The runs in the output of `gpu_ring.py`, which may stand in a page."""
    found: list[Run] = []
    for line in text.splitlines():
        if header := HEADER.match(line):
            found.append(Run(header[1], int(header[2])))
        elif found and (row := ROW.match(line)):
            found[-1].rates[int(row[1]), row[2], row[3]] = float(row[4])
    return [run for run in found if run.rates]


def work(ranks: int, length: int, heads: tuple[int, int, int] = OF_RUN) -> Work:
    """A causal call in bfloat16, in zigzag order, with `length` tokens a rank."""
    rule, (count, kv_heads, dim) = Rule(1.0, causal=True), heads
    pairs = visible_pairs(rule, "zigzag", ranks, length, length)
    plan = hops.plan(rule, "zigzag", ranks, length, length)
    return Work(1, length, length, count, kv_heads, dim, dim, 2, pairs, plan)


def compared(run: Run) -> Iterator[tuple[str, float, float]]:
    """The measured and the predicted TFLOP/s of each strategy, by its name. It has the fixed time of one GPU's call."""
    base = of_kind(run.kind)
    assert base is not None, f"the cost model has no constants for {run.kind}"
    device = run.device(base)
    for tokens, part in dict.fromkeys((tokens, part) for tokens, part, _ in run.rates):
        for plan in choose.reckoned(work(run.ranks, tokens // run.ranks), device):
            measured = run.rates.get((tokens, part, plan.strategy))
            if measured is not None:
                seconds = run.fitted(part)[0] + (total(plan.forward) if part == "forward" else plan.seconds)
                model = operations(tokens**2 / 2 / run.ranks, part) / seconds / 1e12
                yield f"{run.ranks} {base.name}, {tokens} tokens, {part}: {plan.strategy}", measured, model


def extrapolated(
    plan: str, device: Device, chips: int, length: int, heads: tuple[int, int, int], inner: int
) -> tuple[float, int]:
    """Seconds of both passes, and bytes of one chip: each further group of `inner` ranks adds the same to both."""
    few, more = (
        next(x for x in choose.reckoned(work(ranks, length, heads), device, inner) if x.strategy == plan)
        for ranks in (4 * inner, 5 * inner)
    )
    further = chips // inner - 4
    return few.seconds + (more.seconds - few.seconds) * further, few.memory + (more.memory - few.memory) * further


def kept(plan: str, device: Device, chips: int, length: int, heads: tuple[int, int, int], inner: int) -> float | None:
    """The share of the kernels' rate that a chip keeps: its operations at that rate, over the time of both passes.

    `None` where the plan does not fit into the memory of a chip.
    """
    made = work(1, length, heads)
    forward, backward = device.rate(made.itemsize, made.head_dim)
    pairs = length**2 * chips / 2
    alone = pairs * (made.operations[0] / forward + made.operations[1] / backward)
    seconds, memory = extrapolated(plan, device, chips, length, heads, inner)
    return alone / seconds if memory <= device.memory else None


def hiding(device: Device, heads: tuple[int, int, int], inner: int, passes: str) -> int | None:
    """The least tokens a chip, in steps of 256, at which every send between hops of a pass hides behind its kernel."""

    def hides(length: int) -> bool:
        plan = choose.reckoned(work(4 * inner, length, heads), device, inner)[0 if inner == 1 else 2]
        return all(step.hides is not False for step in getattr(plan, passes) if step.name.startswith("hop"))

    found = bisect.bisect_left(LENGTHS, True, key=hides)
    return LENGTHS[found] if found < len(LENGTHS) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="files with the output of gpu_ring.py")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--chips", type=int, nargs="*", default=[1024, 16384])
    parser.add_argument("--plot", type=Path, help="an SVG or PNG file")
    arguments = parser.parse_args()
    heads = (arguments.heads, arguments.kv_heads, arguments.head_size)
    device = DEVICES[arguments.device]
    found = [run for path in arguments.measured for run in runs(path.read_text())]
    if found:
        print("The model beside measured strategies, TFLOP/s of a GPU:\n")
        print(f"{'':<50}  {'measured':>8}  {'model':>8}  {'model over measured':>19}")
    for run in found:
        for name, measured, model in compared(run):
            print(f"{name:<50}  {measured:8.1f}  {model:8.1f}  {model / measured:19.3f}")
    if found:
        fastest = max(found, key=lambda run: run.fitted("forward")[1])
        rate = fastest.device(device).rates[OF_RUN[2]]
        device = dataclasses.replace(device, rates={**device.rates, OF_RUN[2]: rate})
        print(f"\nKernel rates of heads of {OF_RUN[2]}: measured; all else: constants. {device.source}.")
    else:
        print(f"All rates are constants of the model, not measured here. {device.source}.")
    # More ranks than a host has: everything between hosts, and groups of one host exchange heads.
    inner = device.host if device.host < min(arguments.chips) and heads[0] % device.host == 0 else 1
    projected(device, heads, inner, arguments.chips)
    if arguments.plot is not None:
        plotted(device, heads, inner, arguments.chips).savefig(arguments.plot)


def candidates(inner: int) -> list[tuple[str, str, int]]:
    """Name, strategy and group size of the plans that are compared."""
    mixed = [(f"ulysses of {inner}, ring over hosts", "ulysses", inner)] if inner > 1 else []
    return [("ring", "ring", 1), ("all_gather", "all_gather", 1), *mixed]


def projected(device: Device, heads: tuple[int, int, int], inner: int, chips: Sequence[int]) -> None:
    """Prints at how many tokens a chip sends hide, and what each plan keeps of the kernels' rate."""
    print("\nThe least tokens a chip, in steps of 256, at which every send between hops hides:\n")
    far = device.linked_by(device.far)
    places = {f"ring within a host ({device.near.name})": (device.linked_by(device.near), 1)}
    if device.far != device.near:
        places[f"ring over {device.far.name}"] = (far, 1)
    if inner > 1:
        places[f"ulysses of {inner}, ring over {device.far.name}"] = (device, inner)
    for name, (linked, group) in places.items():
        both = [hiding(linked, heads, group, passes) for passes in ("forward", "backward")]
        print(f"{name:<40}  forward {both[0] or 'never':>6}  backward {both[1] or 'never':>6}")
    print("\nThe share of the kernels' rate that is kept, both passes:\n")
    print(f"{'chips':>6}  {'tokens a chip':>13}  " + "  ".join(f"{name:>30}" for name, *_ in candidates(inner)))
    for count in chips:
        for length in TOKENS[1::2]:
            shares = [kept(plan, far_of(device, n), count, length, heads, n) for _, plan, n in candidates(inner)]
            cells = ["no memory" if share is None else f"{share:.2f}" for share in shares]
            print(f"{count:>6}  {length:>13}  " + "  ".join(f"{cell:>30}" for cell in cells))


def far_of(device: Device, group: int) -> Device:
    """The device as it is for groups of one host, else with the link between hosts."""
    return device if group > 1 else device.linked_by(device.far)


def plotted(device: Device, heads: tuple[int, int, int], inner: int, chips: Sequence[int]) -> Any:
    """What each plan keeps of the kernels' rate, over the tokens of a chip."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(7, 4), layout="constrained")
    axes = made.subplots()
    for style, count in zip(("-", "o", "x"), chips, strict=False):
        for number, (name, plan, group) in enumerate(candidates(inner)):
            linked = far_of(device, group)
            shares = [kept(plan, linked, count, length, heads, group) for length in TOKENS]
            fitting = [math.nan if share is None else share for share in shares]
            label = f"{name}, {count} chips"
            axes.plot(TOKENS, fitting, style, color=f"C{number}", markerfacecolor="none", label=label)
    hides = hiding(device.linked_by(device.far), heads, 1, "backward")
    if hides:
        axes.axvline(hides, color="0.7", linewidth=1)
        axes.annotate("the ring's sends hide", (hides, 0.6), (4, 0), textcoords="offset points", color="0.4")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.set_xlabel("tokens a chip")
    axes.set_ylabel("share of the kernels' rate, both passes")
    query, keys, size = heads
    axes.set_title(
        f"{device.name}: {query} heads, {keys} of keys, of {size}; causal, zigzag; a model", fontsize="medium"
    )
    axes.legend(frameon=False, fontsize="small")
    return made


if __name__ == "__main__":
    main()
