# SPDX-License-Identifier: Apache-2.0
"""Which candidate is fastest: all take turns, the slow ones leave early, and the medians of the rest decide."""

import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import jax

from ..backends.discovery import Registration
from ..config import BwdParams, FwdParams, RingAttentionConfig
from ..errors import TuningError
from ..masks.builder import Built
from .problem import Problem, machine, tunable
from .progress import Progress
from .trial import release, trial

Params = TypeVar("Params", FwdParams, BwdParams)
Result = TypeVar("Result")

TIE: Final = 0.02
"""The part by which a candidate must be faster than the default to be chosen instead."""
LEAVING: Final = ((1, 2.0), (3, 1.3), (7, 1.1))
"""After how many rounds a candidate leaves whose fastest is by which factor that of the fastest; the default stays.

What else the machine does only adds to a time, and hits whom it will: of few rounds the fastest tells most.
"""
ROUNDS: Final = 15
LEAST_SECONDS: Final = 0.01
"""A measurement takes at least so long: of faster programs it is one of several calls in a row."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """What became of one candidate: the median seconds of its rounds, or why it did not run."""

    part: str
    params: FwdParams | BwdParams
    seconds: float | None = None
    rounds: int = 0
    failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "params": self.params.to_dict()}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The configuration that was chosen, and every candidate that it was chosen from, defaults first."""

    config: RingAttentionConfig
    forward: tuple[Timed, ...]
    backward: tuple[Timed, ...]

    @property
    def trials(self) -> tuple[Timed, ...]:
        return (*self.forward, *self.backward)


def fastest(
    registration: Registration,
    problem: Problem,
    default: RingAttentionConfig,
    built: Built | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """The fastest of the backend's candidates, or the default where nothing is faster by more than `TIE`, or offered.

    A candidate that does not compile, or has not enough memory, is recorded and passed over. Whatever is being traced
    where this is called does not see any of it.
    """
    kernel = registration.implementation()
    if not tunable(registration):
        raise TuningError(
            registration.name,
            "it gives no candidate_configs",
            "Pass its parameters with cfg=, or name a backend that gives candidates",
        )
    offered = kernel.candidate_configs(problem)
    if not offered:
        return Outcome(default, (), ())
    candidates = [default, *offered]
    progress = Progress() if progress is None else progress
    stop = threading.Event()
    device = _device(problem)

    def measure() -> Outcome:
        with jax.default_device(device):
            race = _Race(registration.name, progress, stop)
            made = trial(kernel, problem, device, built)
            forward, best = race.run("forward", [c.fwd_params for c in candidates], made.forward)
            whole = made.forward(best)()
            backward, backward_best = race.run(
                "backward", [c.bwd_params for c in candidates], lambda params: made.backward(params, whole)
            )
            return Outcome(RingAttentionConfig(best, backward_best), forward, backward)

    try:
        return _apart(measure, stop)
    finally:
        progress.close()
        release()


@dataclasses.dataclass(frozen=True)
class _Race:
    backend: str
    progress: Progress
    stop: threading.Event

    def run(
        self, part: str, candidates: Sequence[Params], program: Callable[[Params], Callable[[], Any]]
    ) -> tuple[tuple[Timed, ...], Params]:
        """What became of each distinct candidate, and the chosen one; the first candidate is the default."""
        candidates = list(dict.fromkeys(candidates))
        self.progress.add(len(candidates) * (1 + ROUNDS))
        runs: dict[Params, Callable[[], Any]] = {}
        failures: dict[Params, str] = {}
        for params in candidates:
            self._step(f"{part}: compiling {shown(params)}")
            try:
                runs[params] = program(params)
                jax.block_until_ready(runs[params]())
            except Exception as error:
                failures[params] = _failure(error)
                runs.pop(params, None)
                self.progress.add(-ROUNDS)
        if not runs:
            told = "; ".join(f"{shown(params)}: {failure}" for params, failure in failures.items())
            raise TuningError(
                self.backend, f"no candidate of its {part} ran ({told})", "Tune a smaller problem, or pass cfg="
            )
        seconds = self._timed(part, runs, candidates[0])
        medians = {params: statistics.median(taken) for params, taken in seconds.items()}
        timed = tuple(
            Timed(part, params, medians.get(params), len(seconds.get(params, ())), failures.get(params))
            for params in candidates
        )
        return timed, _chosen(candidates[0], medians, seconds)

    def _timed(self, part: str, runs: Mapping[Params, Callable[[], Any]], default: Params) -> dict[Params, list[float]]:
        least = {params: _seconds(run, 1) for params, run in runs.items()}
        calls = {params: max(1, math.ceil(LEAST_SECONDS / max(taken, 1e-6))) for params, taken in least.items()}
        seconds: dict[Params, list[float]] = {params: [] for params in runs}
        racing, leaving = list(runs), dict(LEAVING)
        for number in range(1, ROUNDS + 1):
            for params in racing if number % 2 else reversed(racing):
                self._step(f"{part}: round {number} of {ROUNDS}, {shown(params)}")
                seconds[params].append(_seconds(runs[params], calls[params]))
                least[params] = min(least[params], seconds[params][-1])
            if number in leaving:
                slowest = leaving[number] * min(least.values())
                staying = [params for params in racing if params == default or least[params] <= slowest]
                self.progress.add((len(staying) - len(racing)) * (ROUNDS - number))
                racing = staying
        return seconds

    def _step(self, what: str) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt
        self.progress.step(what)


def _chosen(default: Params, medians: Mapping[Params, float], seconds: Mapping[Params, Sequence[float]]) -> Params:
    """Of those that stayed to the end the one with the least median; the default where that is hardly more."""
    rounds = max(map(len, seconds.values()))
    best = min((params for params in medians if len(seconds[params]) == rounds), key=medians.__getitem__)
    return default if default in medians and medians[default] <= medians[best] * (1 + TIE) else best


def shown(params: FwdParams | BwdParams) -> str:
    """Parameters in a few characters."""
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
        problem.backend, f"no device of this process is {problem.device!r}", "Tune on a machine that has one"
    )


def _apart(work: Callable[[], Result], stop: threading.Event) -> Result:
    """The result of `work` in a thread of its own, where nothing is being traced and no mesh is set."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ringattn-tuning", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        stop.set()
        thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
