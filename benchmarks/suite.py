# SPDX-License-Identifier: Apache-2.0
"""Measures ours and every installed rival on the workloads of one platform, and compares two such runs.

`python benchmarks/suite.py --suite cpu`, or `gpu`, `gpus`, `tpu`: a table, and a JSON file. `--plots FOLDER` also draws
throughput against length and efficiency against ring size. `compare A.json B.json` says which differences exceed the
noise.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import floors
import suite_report
from measuring import Row, Task, work
from rivals import OURS
from workloads import SUITES

PATIENCE: Final = 600
"""Seconds in which a candidate must compile and run once."""
Key = tuple[str, str, str, int]
"""A workload, a part of it, who computes it, and the size of the ring."""


class Progress:
    """Prints what runs now: on a terminal in one line that changes, else in a line for each workload."""

    def __init__(self, total: int) -> None:
        self._total, self._number, self._start, self._workload = total, 0, time.monotonic(), ""

    def workload(self, name: str) -> None:
        self._number, self._workload = self._number + 1, name
        self._show("", "" if sys.stderr.isatty() else "\n")

    def candidate(self, part: str, who: str, ring: int) -> None:
        if sys.stderr.isatty():
            self._show(f", {part}: {who}" + (f" on a ring of {ring}" if ring > 1 else ""), "")

    def _show(self, what: str, end: str) -> None:
        seconds = time.monotonic() - self._start
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{start}{self._number}/{self._total} {seconds:4.0f} s  {self._workload}{what}", end=end, file=sys.stderr)
        sys.stderr.flush()

    def end(self) -> None:
        self._show(", done", "\n")


def measure(suite: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """A run: the machine, and a row for every candidate. Each workload runs in a process, because rivals may crash."""
    progress = Progress(len(names))
    machine: dict[str, Any] = {}
    rows: list[Row] = []
    rates: floors.Rates | None = None
    workloads = SUITES[suite]
    for name in names:
        progress.workload(name)
        task = Task(suite, name, rounds, workloads[name].parts)
        while task.parts:
            found, task = _one_process(task, progress.candidate)
            rows += found["rows"]
            machine = machine or found["machine"]
            rates = floors.best(floors.Rates(**found["machine"]["rates"]), rates)
    progress.end()
    assert rates is not None, "every process tells its rates before it measures"
    machine["rates"] = dataclasses.asdict(rates)
    for place, row in enumerate(rows):
        if row.seconds:
            of_one = floors.shared(rates, row.ring) if suite == "cpu" else rates
            floor = floors.seconds(workloads[row.workload], row.part, row.ring, of_one)
            rows[place] = dataclasses.replace(row, floor=floor)
    return {"suite": suite, "rounds": rounds, "machine": machine, "rows": rows}


def _one_process(task: Task, started: Callable[[str, str, int], None]) -> tuple[dict[str, Any], Task]:
    """What one process measured, and what is left: nothing, or the parts from the one in which it crashed."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(task, theirs))
    process.start()
    theirs.close()
    found: dict[str, Any] = {"rows": [], "machine": None}
    last, problem = None, None
    try:
        while problem is None:
            if not pipe.poll(PATIENCE):
                problem = f"nothing happened for {PATIENCE} s"
                process.kill()
                break
            message = pipe.recv()
            if isinstance(message, dict):
                found["machine"] = message
            elif isinstance(message, tuple):
                last = message
                started(*message)
            else:
                found["rows"] += message
    except EOFError:
        pass
    process.join()
    if problem is None and process.exitcode == 0:
        return found, dataclasses.replace(task, parts=())
    if last is None:
        raise SystemExit(process.exitcode or 1)
    code = process.exitcode or 0
    problem = problem or (f"it ended the process with {signal.Signals(-code).name if code < 0 else f'status {code}'}")
    done = {row.part for row in found["rows"]}
    parts = tuple(part for part in task.parts if part not in done)
    return found, dataclasses.replace(task, parts=parts, crashed={**task.crashed, last: problem})


def _work(task: Task, pipe: Any) -> None:
    work(task, pipe.send)


def read(path: Path) -> dict[str, Any]:
    """Reads a run from its JSON file."""
    run = json.loads(path.read_text())
    rows = [Row(**{**row, "seconds": tuple(row["seconds"])}) for row in run["rows"]]
    return {**run, "rows": rows}


def write(run: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(row) for row in run["rows"]]
    path.write_text(json.dumps({**run, "rows": rows}, indent=1) + "\n")


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints which differences exceed the noise. Returns 1 if ours became slower, and 2 for incomparable runs.

    A difference counts if the rounds of one run are all slower than all rounds of the other, after the machine's drift
    is divided out: the median of what the rivals took in the second run over what they took in the first.
    """
    same = {"suite": (before["suite"], after["suite"])}
    same |= {name: (before["machine"][name], after["machine"][name]) for name in ("device", "devices")}
    for name, (old, new) in same.items():
        if old != new:
            print(f"These runs cannot be compared: their {name} is {old!r} and {new!r}.")
            return 2
    old, new = _timed(before), _timed(after)
    both = [key for key in old if key in new]
    if not both:
        print("These runs have no measurement in common.")
        return 2
    drift = drift_of(old, new)
    print(f"before: {before['machine']['date']}, commit {before['machine']['commit']}, JAX {before['machine']['jax']}")
    print(f"after:  {after['machine']['date']}, commit {after['machine']['commit']}, JAX {after['machine']['jax']}")
    print(f"The machine: rivals took {drift:.3f} times as long in the median; this is divided out below.\n")
    expected = 0.0
    different: list[tuple[Key, float]] = []
    for key in both:
        first, second = old[key].seconds, tuple(x / drift for x in new[key].seconds)
        expected += 2 / math.comb(len(first) + len(second), len(first))
        if min(second) > max(first) or max(second) < min(first):
            different.append((key, statistics.median(second) / statistics.median(first)))
    for (workload, part, who, ring), ratio in sorted(different, key=lambda item: -item[1]):
        where = f"{workload}, {part}: {who}" + (f", ring of {ring}" if ring > 1 else "")
        print(f"{'slower' if ratio > 1 else 'faster'}  {ratio:6.3f} x  {where}")
    print(
        f"{len(different)} of {len(both)} measurements differ by more than their noise; "
        f"chance alone would make about {expected:.1f} of them differ."
    )
    for key in sorted({*_rows(before), *_rows(after)}):
        mine, yours = (_rows(run).get(key) for run in (before, after))
        if (mine is None or mine.problem) != (yours is None or yours.problem):
            print(f"{', '.join(map(str, key))}: before {_state(mine)}; after {_state(yours)}")
    return int(any(ratio > 1 and key[2].startswith(OURS) for key, ratio in different))


def drift_of(old: dict[Key, Row], new: dict[Key, Row]) -> float:
    """How much longer rivals took in the second run: the change of the machine. 1 without rivals."""
    ratios = [
        statistics.median(new[key].seconds) / statistics.median(old[key].seconds)
        for key in old
        if key in new and not key[2].startswith(OURS)
    ]
    return statistics.median(ratios) if ratios else 1.0


def _rows(run: dict[str, Any]) -> dict[Key, Row]:
    return {(row.workload, row.part, row.who, row.ring): row for row in run["rows"]}


def _timed(run: dict[str, Any]) -> dict[Key, Row]:
    return {key: row for key, row in _rows(run).items() if row.seconds}


def _state(row: Row | None) -> str:
    return "not in the run" if row is None else row.problem or "measured"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    comparing = commands.add_parser("compare", help="which differences between two runs exceed their noise")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    show = commands.add_parser("show", help="the table of a run, and with --plots its plots")
    show.add_argument("run", type=Path)
    show.add_argument("--plots", type=Path)
    parser.add_argument("--suite", choices=list(SUITES))
    parser.add_argument("--only", nargs="*", help="the workloads to measure; all if none is named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the run is written; build/bench-SUITE.json by default")
    parser.add_argument("--plots", type=Path, help="a folder for the plots")
    asked = parser.parse_args(given)
    if asked.command == "compare":
        return compare(read(asked.before), read(asked.after))
    if asked.command == "show":
        run = read(asked.run)
    else:
        if asked.suite is None:
            parser.error("name a suite, such as --suite cpu")
        workloads = list(SUITES[asked.suite])
        unknown = [name for name in asked.only or () if name not in workloads]
        if unknown:
            parser.error(f"no workload {unknown[0]!r} in this suite; there are {', '.join(map(repr, workloads))}")
        run = measure(asked.suite, asked.only or workloads, asked.rounds)
        path = asked.json or Path("build") / f"bench-{asked.suite}.json"
        write(run, path)
        print(f"the run is in {path}", file=sys.stderr)
    print(suite_report.whole(run))
    if asked.plots:
        suite_report.draw(run, asked.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
