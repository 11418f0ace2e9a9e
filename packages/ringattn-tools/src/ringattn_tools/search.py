# SPDX-License-Identifier: Apache-2.0
"""Finds a kernel's fastest configuration: times candidates in turn, drops slow ones early, and compares medians."""

import dataclasses
import functools
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import jax
from rich.console import Console
from rich.progress import Progress
from ringattn_core.backends.discovery import Registration, get
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.contract.features import Feature
from ringattn_core.errors import TuningError
from ringattn_core.tuning import choice
from ringattn_core.tuning.problem import Problem, machine, tunable

from . import tuned_files
from .trial import release, trial

Params = TypeVar("Params", FwdParams, BwdParams)

TIE: Final = 0.02
"""A candidate replaces the default only if the median time of the default is longer by more than this fraction."""
DROPPING_OUT: Final = ((1, 2.0), (3, 1.3), (7, 1.1))
"""`(rounds, factor)`: after `rounds`, a candidate drops out if its least time is over `factor` times the least of all.

Least times are compared, because other work on the machine only adds to a time. The default never drops out.
"""
ROUNDS: Final = 15
LEAST_SECONDS: Final = 0.01
"""The least duration of one measurement: a faster program is called several times in a row."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """The result of one candidate: the median `seconds` of its rounds, or the `failure` that kept it from running."""

    part: str
    params: FwdParams | BwdParams
    seconds: float | None = None
    rounds: int = 0
    failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "params": self.params.to_dict()}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The chosen configuration, and the results of all candidates; the default is the first of them."""

    config: RingAttentionConfig
    forward: tuple[Timed, ...]
    backward: tuple[Timed, ...]

    @property
    def trials(self) -> tuple[Timed, ...]:
        return (*self.forward, *self.backward)


def tune(problem: Problem, registration: Registration | None = None, keep: bool = True) -> Outcome:
    """Times every candidate of the backend for `problem`; with `keep`, later calls of the problem run with the fastest.

    The backend is `registration`, by default the one that `problem` names. `keep` stores the results in memory and on
    disk; only in memory if this process registered the backend itself, because such a backend has no version.
    """
    registration = get(problem.backend) if registration is None else registration
    outcome = fastest(registration, problem, choice.default(registration, problem))
    if keep:
        tuned_files.store(registration, problem, outcome.config, [timed.to_dict() for timed in outcome.trials])
    return outcome


def fastest(registration: Registration, problem: Problem, default: RingAttentionConfig) -> Outcome:
    """Times the backend's candidates and returns the fastest; `default`, unless one beats it by more than `TIE`.

    A candidate that does not compile, or runs out of memory, is recorded and skipped. All work runs in another thread:
    the caller's thread may be tracing a program, which would capture the work.
    """
    kernel = registration.implementation()
    if not tunable(registration):
        raise TuningError(
            registration.name,
            "it has no candidate_configs",
            "Pass its parameters with cfg=, or name a backend that has them",
        )
    offered = kernel.candidate_configs(problem)
    if not offered:
        return Outcome(default, (), ())
    candidates, stop, device = [default, *offered], threading.Event(), _device(problem)
    quiet = not sys.stderr.isatty()
    line = Progress(
        "{task.description}",
        console=Console(stderr=True, quiet=quiet),
        auto_refresh=False,  # it would start a thread, which would disturb the times
        transient=True,
        disable=quiet,
    )
    task = line.add_task("")

    def step(what: str) -> None:
        """Shows on a terminal what is done next; raises if the caller's thread was interrupted."""
        if stop.is_set():
            raise KeyboardInterrupt
        line.update(task, description=what, refresh=True)

    def measure() -> Outcome:
        with jax.default_device(device), line:
            made = trial(kernel, problem, device)
            forward, best = _race(registration.name, "forward", [x.fwd_params for x in candidates], made.forward, step)
            if not registration.descriptor().supports(Feature.GRADIENTS):
                return Outcome(RingAttentionConfig(best, default.bwd_params), forward, ())
            program = functools.partial(made.backward, whole=made.forward(best)())
            backward, best_of_backward = _race(
                registration.name, "backward", [x.bwd_params for x in candidates], program, step
            )
            return Outcome(RingAttentionConfig(best, best_of_backward), forward, backward)

    try:
        with ThreadPoolExecutor(1, "ringattn-tuning") as pool:
            try:
                return pool.submit(measure).result()
            finally:
                stop.set()
    finally:
        release()


def _race(
    backend: str,
    part: str,
    candidates: Sequence[Params],
    program: Callable[[Params], Callable[[], Any]],
    step: Callable[[str], None],
) -> tuple[tuple[Timed, ...], Params]:
    """Times each distinct candidate; returns the results of all, and the parameters of the chosen one.

    `part` is "forward" or "backward". `program(params)` makes the function to time. The candidate with the least median
    time is chosen, of those that were timed in all rounds. The first candidate is the default; it is chosen if its
    median time is longer by at most the fraction `TIE`.
    """
    candidates = list(dict.fromkeys(candidates))
    default = candidates[0]
    runs: dict[Params, Callable[[], Any]] = {}
    failures: dict[Params, str] = {}
    for params in candidates:
        step(f"{part}: compiling {shown(params)}")
        try:
            run = program(params)
            jax.block_until_ready(run())
            runs[params] = run
        except Exception as error:
            failures[params] = _failure(error)
    if not runs:
        told = "; ".join(f"{shown(params)}: {failure}" for params, failure in failures.items())
        raise TuningError(backend, f"no candidate of its {part} ran ({told})", "Tune a smaller problem, or pass cfg=")
    seconds = _timed(part, runs, default, step)
    medians = {params: statistics.median(taken) for params, taken in seconds.items()}
    timed = tuple(
        Timed(part, params, medians.get(params), len(seconds.get(params, ())), failures.get(params))
        for params in candidates
    )
    best = min((params for params in runs if len(seconds[params]) == ROUNDS), key=medians.__getitem__)
    return timed, default if default in runs and medians[default] <= medians[best] * (1 + TIE) else best


def _timed(
    part: str, runs: Mapping[Params, Callable[[], Any]], default: Params, step: Callable[[str], None]
) -> dict[Params, list[float]]:
    """Times the candidates in rounds: for each, the seconds of one call in every round until it drops out."""
    least = {params: _seconds(run, 1) for params, run in runs.items()}
    calls = {params: max(1, math.ceil(LEAST_SECONDS / max(taken, 1e-6))) for params, taken in least.items()}
    seconds: dict[Params, list[float]] = {params: [] for params in runs}
    racing, factors = list(runs), dict(DROPPING_OUT)
    for number in range(1, ROUNDS + 1):
        for params in racing if number % 2 else racing[::-1]:
            step(f"{part}: round {number} of {ROUNDS}, {shown(params)}")
            seconds[params].append(_seconds(runs[params], calls[params]))
            least[params] = min(least[params], seconds[params][-1])
        if number in factors:
            slowest = factors[number] * min(least.values())
            racing = [params for params in racing if params == default or least[params] <= slowest]
    return seconds


def shown(params: FwdParams | BwdParams) -> str:
    """Parameters as short text, such as "q_blocksize=256 kv_blocksize=512"."""
    given = {**params.to_dict(), **dict(params.extra)}
    given.pop("extra", None)
    return " ".join(f"{name}={value}" for name, value in given.items()) or "as the kernel chooses"


def _seconds(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(calls)])
    return (time.perf_counter() - start) / calls


def _failure(error: Exception) -> str:
    told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    short = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in told
    return f"out of memory: {told}" if short else told


def _device(problem: Problem) -> jax.Device:
    try:
        devices = jax.local_devices(backend=problem.platform)
    except RuntimeError:
        devices = []
    for device in devices:
        if machine(device.device_kind) == problem.device:
            return device
    raise TuningError(
        problem.backend, f"this process has no device {problem.device!r}", "Tune on a machine that has one"
    )
