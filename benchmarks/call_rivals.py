# SPDX-License-Identifier: Apache-2.0
"""A whole call on one Hopper beside FlashAttention-3: its time over ours, forward and with gradients.

`python call_rivals.py causal documents`, or no name for the cases of `workloads.py` and d192; `--list`
names all. `interleaved.py` explains `sustained` and `burst`.
All programs are compiled before the first is timed, one after the other: Triton's compiler fails in several threads.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Final

import jax
from interleaved import TIMINGS, both_timings, report
from measuring import TOLERANCES, Prepared, prepare, relative
from rivals import OURS, RIVALS
from workloads import CASES, SUITES, Shape, Workload

RIVAL: Final = "FlashAttention-3"
UNORDERED: Final = "ours, unordered"
MINE: Final = {"forward": (OURS,), "forward+backward": (OURS, UNORDERED)}
"""Our candidates in each part."""
COLUMNS: Final = [(part, who, timing) for part, mine in MINE.items() for who in mine for timing in TIMINGS]
ALL: Final = {name: case for name, case in SUITES["gpu"].items() if not case.decode} | {
    "d192": Workload(Shape(2, 8192, 8, 8, 192))
}
DEFAULT: Final = (*CASES, "d192")
Seconds = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By part, timing and candidate."""


def compiled(name: str) -> dict[str, dict[str, Prepared]]:
    """Compiles ours and the rival for each part of a case. Raises if they compute different things."""
    case, found = ALL[name], {}
    for part in case.parts:
        found[part] = {who: prepare(RIVALS["gpu"][who], case, part, 1) for who in (*MINE[part], RIVAL)}
        right = found[part][RIVAL].results()
        for who in MINE[part]:
            apart = max(map(relative, found[part][who].results(), right))
            if apart > TOLERANCES[case.shape.dtype]:
                raise SystemExit(f"{name}, {part}: {who} differs from {RIVAL} by {apart:.1e}")
    return found


def heading() -> str:
    names = [f"{part}{' unordered' if who == UNORDERED else ''}, {timing}" for part, who, timing in COLUMNS]
    return "| " + " | ".join([f"{RIVAL}'s time over ours", *names]) + " |\n|" + "---|" * (1 + len(names))


def row(name: str, seconds: Seconds) -> str:
    """A row of the table, with a dash where a case has no such part."""
    cells = []
    for part, who, timing in COLUMNS:
        times = seconds.get(part, {}).get(timing)
        cells.append("-" if times is None else f"{times[RIVAL] / times[who]:.2f}")
    return "| " + " | ".join([name, *cells]) + " |"


def measure(names: Sequence[str], rounds: int) -> None:
    """Prints the table, and all milliseconds after it."""
    made = {name: compiled(name) for name in names}
    raw = {}
    print(heading())
    for name, parts in made.items():
        seconds = {part: both_timings({who: x.call for who, x in runs.items()}, rounds) for part, runs in parts.items()}
        print(row(name, seconds), flush=True)
        for part, timings in seconds.items():
            for timing, times in timings.items():
                raw |= {f"{name} {part}, {timing}: {who}, ms": 1e3 * x for who, x in times.items()}
    report("call_rivals.py", [], raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--list", action="store_true", help="print the names of all cases, and end")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    names = asked.cases or list(DEFAULT)
    unknown = [name for name in names if name not in ALL]
    if unknown or asked.list:
        print("\n".join(ALL))
        raise SystemExit(f"there is no case {unknown[0]!r} among these" if unknown else 0)
    if jax.default_backend() != "gpu":
        raise SystemExit("this benchmark needs a GPU, and JAX sees none in this process")
    problem = next(filter(None, (RIVALS["gpu"][RIVAL].why_not(ALL[name]) for name in names)), None)
    if problem is not None:
        raise SystemExit(problem)
    measure(names, asked.rounds)


if __name__ == "__main__":
    main()
