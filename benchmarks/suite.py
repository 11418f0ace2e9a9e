# SPDX-License-Identifier: Apache-2.0
"""Measures ours and every installed rival on the workloads of one platform, and compares two such runs.

`python benchmarks/suite.py --suite cpu`, or `gpu`, `gpus`, `tpu`: a table, and a JSON file. `--docs` also writes the
table and the plots into docs/benchmarks.md. `compare A.json B.json` says which differences exceed the noise.
"""

import argparse
import dataclasses
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import comparison
import floors
import suite_page
import suite_tables
from measuring import Row, Task, work
from workloads import SMALL, SUITES

PATIENCE: Final = 600
"""Seconds in which a candidate must compile and run once."""


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


def measure(suite: str, names: Sequence[str], smoke: bool, rounds: int) -> dict[str, Any]:
    """A run: the machine, and a row for every candidate. Each workload runs in a process, because rivals may crash."""
    progress = Progress(len(names))
    machine: dict[str, Any] = {}
    rows: list[Row] = []
    rates: floors.Rates | None = None
    workloads = SMALL if smoke else SUITES[suite]
    for name in names:
        progress.workload(name)
        task = Task(suite, smoke, name, rounds, workloads[name].parts)
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
    return {"suite": suite, "smoke": smoke, "rounds": rounds, "machine": machine, "rows": rows}


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


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    compare = commands.add_parser("compare", help="which differences between two runs exceed their noise")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    show = commands.add_parser("show", help="the table of a run; with --docs, write it and the plots into the docs")
    show.add_argument("run", type=Path)
    show.add_argument("--docs", action="store_true")
    parser.add_argument("--suite", choices=list(SUITES))
    parser.add_argument("--only", nargs="*", help="the workloads to measure; all if none is named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, and rivals that fail: the times mean nothing")
    parser.add_argument("--json", type=Path, help="where the run is written; build/bench-SUITE.json by default")
    parser.add_argument("--docs", action="store_true", help="write the table and the plots into docs/benchmarks.md")
    asked = parser.parse_args(given)
    if asked.command == "compare":
        return comparison.report(read(asked.before), read(asked.after))
    if asked.command == "show":
        run = read(asked.run)
    else:
        if asked.suite is None:
            parser.error("name a suite, such as --suite cpu")
        workloads = list(SMALL if asked.smoke else SUITES[asked.suite])
        unknown = [name for name in asked.only or () if name not in workloads]
        if unknown:
            parser.error(f"no workload {unknown[0]!r} in this suite; there are {', '.join(map(repr, workloads))}")
        run = measure(asked.suite, asked.only or workloads, asked.smoke, asked.rounds)
        path = asked.json or Path("build") / f"bench-{asked.suite}.json"
        write(run, path)
        print(f"the run is in {path}", file=sys.stderr)
    print(suite_tables.whole(run))
    if asked.docs:
        suite_page.update(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
