# SPDX-License-Identifier: Apache-2.0
"""A whole call on one Hopper beside its rivals: the time of the fastest rival over ours, forward and with gradients.

`python call_rivals.py causal documents`, or no name for all cases; `--list` names them. The rivals are
FlashAttention-3, which must be installed unless `--rivals` leaves it out, and FlashAttention-4, tokamax,
jax-linear-attention and cuDNN where they are installed and compute the case; with `--rivals "tokamax in ringattn"` also
the backend `examples/third-party-tokamax`. `interleaved.py` explains `sustained` and `burst`.
All programs are compiled before the first is timed, one after the other: Triton's compiler fails in several threads.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import jax
from interleaved import TIMINGS, both_timings, report
from measuring import TOLERANCES, Prepared, prepare, relative
from rivals import HERE, OURS, RIVALS
from workloads import SUITES, Shape, Workload

NEEDED: Final = "FlashAttention-3"
OTHERS: Final = (NEEDED, "FlashAttention-4", "tokamax", "jax-linear-attention", "cuDNN")
UNORDERED: Final = "ours, unordered"
MINE: Final = {"forward": (OURS,), "forward+backward": (OURS, UNORDERED)}
"""Our candidates in each part."""
COLUMNS: Final = [(part, who, timing) for part, mine in MINE.items() for who in mine for timing in TIMINGS]
CASES: Final = {name: case for name, case in SUITES["gpu"].items() if not case.decode} | {
    "d192": Workload(Shape(2, 8192, 8, 8, 192))
}
Seconds = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By part, timing and candidate."""


def compiled(name: str, others: Sequence[str]) -> dict[str, dict[str, Prepared]]:
    """Compiles ours and the rivals for each part of a case. Leaves out a rival that fails or computes something else.

    A part in which no rival is left is left out, too.
    """
    case, found = CASES[name], {}
    for part in case.parts:
        rivals = {}
        for who in others:
            rival = RIVALS["gpu"][who]
            problem = rival.missing() or rival.why_not(case)
            try:
                rivals |= {} if problem else {who: prepare(rival, case, part, 1)}
            except Exception as error:  # whatever a foreign kernel refuses
                print(f"{name}, {part}: {who} fails: {str(error).splitlines()[0]}", file=sys.stderr)
        mine = {who: prepare(RIVALS["gpu"][who], case, part, 1) for who in MINE[part]}
        right = mine[OURS].results()
        for who, other in [*rivals.items()]:
            if (apart := max(map(relative, other.results(), right))) > TOLERANCES[case.shape.dtype]:
                print(f"{name}, {part}: {who} differs by {apart:.1e}, and is left out", file=sys.stderr)
                del rivals[who]
        found |= {part: mine | rivals} if rivals else {}
    return found


def heading() -> str:
    names = [f"{part}{' unordered' if who == UNORDERED else ''}, {timing}" for part, who, timing in COLUMNS]
    return (
        "| "
        + " | ".join(["time of the best rival over ours", *names, "best rivals"])
        + " |\n|"
        + "---|" * (2 + len(names))
    )


def best(times: Mapping[str, float]) -> str:
    """The fastest rival."""
    return min((who for who in times if who in (*OTHERS, HERE)), key=times.__getitem__)


def row(name: str, seconds: Seconds) -> str:
    """A row of the table, with a dash where a case has no such part."""
    cells = []
    for part, who, timing in COLUMNS:
        times = seconds.get(part, {}).get(timing)
        cells.append("-" if times is None else f"{times[best(times)] / times[who]:.2f}")
    fastest = {best(times): None for timings in seconds.values() for times in timings.values()}
    return "| " + " | ".join([name, *cells, ", ".join(fastest)]) + " |"


def measure(names: Sequence[str], others: Sequence[str], rounds: int) -> None:
    """Prints the table, and all milliseconds after it."""
    made = {name: compiled(name, others) for name in names}
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
    parser.add_argument("--rivals", nargs="+", default=OTHERS, choices=(*OTHERS, HERE))
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    names = asked.cases or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown or asked.list:
        print("\n".join(CASES))
        raise SystemExit(f"there is no case {unknown[0]!r} among these" if unknown else 0)
    if jax.default_backend() != "gpu":
        raise SystemExit("this benchmark needs a GPU, and JAX sees none in this process")
    if NEEDED in asked.rivals and (problem := RIVALS["gpu"][NEEDED].why_not(CASES["causal"])):
        raise SystemExit(problem)
    measure(names, asked.rivals, asked.rounds)


if __name__ == "__main__":
    main()
