# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks compare: the programs, rounds that run every candidate in turn, medians, claims with targets."""

import dataclasses
import json
import math
import operator
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from ringattn_core import ring_attention

Attention = Callable[..., Any]
"""A function of query, key and value, and optionally of sinks and bias."""
COMPARE = {"<=": operator.le, ">=": operator.ge}
ON_A_DEVICE = 0.1
"""Seconds of a measurement on a GPU or TPU that make the share of its host negligible."""
TIMINGS = ("sustained", "burst")
"""Sustained: rounds of some 100 ms a candidate, with the clock that the power limit allows. Burst: a few calls after a
rest, which are over before the GPU lowers its clock."""
REST = 0.03
"""Seconds without work before a burst."""
BURST = 0.005
"""A burst has as many calls as take this many seconds, and at least `FEWEST`."""
FEWEST = 4


def ours(**options: Any) -> Attention:
    """`ring_attention` with these options, as a function of its arrays."""
    return lambda *arrays: ring_attention(*arrays, **options)


def with_gradients(attend: Attention) -> Callable[..., tuple[Any, ...]]:
    """A function of the inputs and the cotangent of the output, which returns the output and each input's gradient.

    As in training, the cotangent waits for the output: otherwise XLA could begin the first send of the
    backward pass before the forward pass.
    """

    def step(*arrays: Any) -> tuple[Any, ...]:
        out, pullback = jax.vjp(attend, *arrays[:-1])
        dout, _ = jax.lax.optimization_barrier((arrays[-1], out))
        return out, *pullback(dout)

    return step


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """The temporary memory of one device, as XLA plans it."""
    memory = program.memory_analysis()
    assert memory is not None, "XLA tells the memory of every program that it compiles for a CPU"
    return memory.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim: a measured value, and how it must compare with a target."""

    what: str
    measured: float
    relation: str
    target: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        return COMPARE[self.relation](self.measured, self.target)


def medians(candidates: Mapping[str, Callable[[], object]], rounds: int, least: float = 0.0) -> dict[str, float]:
    """The median seconds per call of each candidate, over the rounds of `measured_rounds`."""
    found = measured_rounds(candidates, rounds, least)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measured_rounds(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    least: float = 0.0,
    starts: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """The seconds per call of each candidate in each round. All run in every round, so a slow minute hits all alike.

    Each round has an order of its own (`round_order`): a GPU is warmer, and so slower, after some candidates than after
    others.

    Without `least`, a measurement is one call. With `least`, it is as many calls in a row as take that many seconds.
    The GPU then queues calls, so the millisecond that it takes to wake the host does not count. The same number of
    calls runs before, uncounted: a GPU throttles some time after its power limit is reached, and a candidate measured
    after one that draws less power would seem faster. `starts` is told the name of the candidate that runs next.
    """
    calls = {}
    for name, candidate in candidates.items():
        starts(name)
        seconds_of(candidate, 1)
        calls[name] = math.ceil(least / seconds_of(candidate, 1)) if least else 1
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in round_order(candidates, number):
            starts(name)
            if least:
                seconds_of(candidates[name], calls[name])
            found[name].append(seconds_of(candidates[name], calls[name]))
    return found


def round_order(names: Iterable[str], number: int) -> list[str]:
    """The names in the order of round `number`: as given in round 0, then shuffled, in every run alike."""
    ordered = list(names)
    if number:
        random.Random(number).shuffle(ordered)
    return ordered


def bursts(
    candidates: Mapping[str, Callable[[], object]], rounds: int, rest: Callable[[float], None] = time.sleep
) -> dict[str, float]:
    """The median seconds per call of each candidate in bursts. All run in every round, each after a rest."""
    calls = {}
    for name, candidate in candidates.items():
        seconds_of(candidate, 1)
        calls[name] = max(FEWEST, math.ceil(BURST / seconds_of(candidate, FEWEST)))
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in round_order(candidates, number):
            rest(REST)
            found[name].append(seconds_of(candidates[name], calls[name]))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def both_timings(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """The median seconds per call of each candidate on a GPU, by the names of `TIMINGS`; bursts come first."""
    burst = bursts(candidates, rounds)
    return {"sustained": medians(candidates, rounds, ON_A_DEVICE), "burst": burst}


def seconds_of(candidate: Callable[[], object], calls: int) -> float:
    """The seconds per call, of `calls` in a row."""
    start = time.perf_counter()
    for _ in range(calls - 1):
        candidate()
    jax.block_until_ready(candidate())
    return (time.perf_counter() - start) / calls


def report(script: str, claims: Sequence[Claim], raw: Mapping[str, float]) -> None:
    """Prints the raw numbers, the table of claims, and both again as one line of JSON."""
    print(f"\n{script}: jax {jax.__version__}, {jax.devices()[0].device_kind}, {len(jax.devices())} device(s)\n")
    widest = max(map(len, [*raw, *(claim.what for claim in claims)]))
    for name, value in raw.items():
        print(f"{name:<{widest}}  {value:12.4g}")
    print(f"\n{'claim':<{widest}}  {'measured':>12}  {'target':>14}  holds")
    for claim in claims:
        target = f"{claim.relation} {claim.target:.4g} {claim.unit}".strip()
        print(f"{claim.what:<{widest}}  {claim.measured:12.4g}  {target:>14}  {'yes' if claim.holds else 'NO'}")
    rows = [{**dataclasses.asdict(claim), "holds": claim.holds} for claim in claims]
    print("\n" + json.dumps({"script": script, "jax": jax.__version__, "claims": rows, "raw": dict(raw)}))
