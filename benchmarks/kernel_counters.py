# SPDX-License-Identifier: Apache-2.0
"""What bounds the Hopper kernels: hardware counters of ours and of FlashAttention-3's, by NVIDIA's profiler `ncu`.

`python kernel_counters.py causal d192` prints, for each named case of `call_rivals.py`, the longest kernel of each pass
of ours and of FlashAttention-3, and of our backward pass without an order. After milliseconds and millions of cycles,
every column is the percentage of the cycles in which something happens (`COLUMNS`).
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Final

PERCENT: Final = ".avg.pct_of_peak_sustained_elapsed"
SHARED: Final = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
CYCLES: Final = "sm__cycles_elapsed.max"
NANOSECONDS: Final = "gpu__time_duration.sum"
CONFLICTS: Final = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.avg"
COLUMNS: Final = {
    # The tensor cores compute; shared memory answers; it answers products, loads and stores of threads; it repeats an
    # answer because of conflicts between banks; an instruction is issued; the second-level cache receives data, adds.
    "tensor cores": "sm__pipe_tensor_cycles_active" + PERCENT,
    "shared memory": "l1tex__data_pipe_lsu_wavefronts" + PERCENT,
    "products": SHARED + "_op_gmma" + PERCENT,
    "loads": SHARED + "_op_ld" + PERCENT,
    "stores": SHARED + "_op_st" + PERCENT,
    "conflicts": CONFLICTS,
    "issued": "sm__issue_active" + PERCENT,
    "cache": "lts__xbar2lts_cycles_active" + PERCENT,
    "additions": "lts__d_atomic_input_cycles_active" + PERCENT,
}
"""The heading of each column, and the counter in it."""
WHO: Final = ("ours", "ours, unordered", "FlashAttention-3")
KERNELS: Final = "forward|backward|device_kernel"
"""A pattern in the names of the kernels: ours, and those of CUTLASS."""


def call_twice(case: str, who: str) -> None:
    """Runs a case with gradients, first to warm up. This is what the profiler watches."""
    import jax
    from call_rivals import CASES
    from measuring import prepare
    from rivals import RIVALS

    call = prepare(RIVALS["gpu"][who], CASES[case], "forward+backward", 1).call
    for _ in range(2):
        jax.block_until_ready(call())


def profile(case: str, who: str) -> str:
    """What `ncu` prints about both calls: one line for each counter of each kernel. Leaves the clock as it is."""
    counters = ",".join([NANOSECONDS, CYCLES, *COLUMNS.values()])
    line = ["ncu", "--csv", "--clock-control", "none", "--cache-control", "none", "-k", f"regex:{KERNELS}"]
    line += ["--print-units", "base", "--metrics", counters, sys.executable, __file__, "--inside", who, case]
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | memory)
    if done.returncode:
        raise SystemExit(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def of_passes(printed: Iterable[str]) -> dict[str, dict[str, float]]:
    """The counters of the longest kernel of each pass in the second call. Lines before the table are the profiler's."""
    lines = list(printed)
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit("ncu saw no kernel of attention")
    kernels: dict[tuple[str, str], dict[str, float]] = {}
    for line in csv.DictReader(lines[start:]):
        part = "backward" if re.search("backward|Bwd", line["Kernel Name"]) else "forward"
        counters = kernels.setdefault((part, line["ID"]), {})
        counters[line["Metric Name"]] = float(line["Metric Value"].replace(",", ""))
    second = [*kernels.items()][len(kernels) // 2 :]
    ascending = sorted(second, key=lambda kernel: kernel[1][NANOSECONDS])
    return {part: counters for (part, _), counters in ascending}


def row(*, case: str, who: str, part: str, counters: Mapping[str, float]) -> str:
    percents = {**counters, CONFLICTS: 100 * counters[CONFLICTS] / counters[CYCLES]}
    times = f"{counters[NANOSECONDS] / 1e6:.3f} | {counters[CYCLES] / 1e6:.2f}"
    return " | ".join([f"| {case}", part, who, times, *(f"{percents[name]:.0f}" for name in COLUMNS.values())]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--inside", metavar="WHO", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        return call_twice(asked.cases[0], asked.inside)
    from call_rivals import CASES, NEEDED
    from rivals import RIVALS

    for case in asked.cases:
        if case not in CASES or "forward+backward" not in CASES[case].parts:
            raise SystemExit(f"there is no case {case!r} with gradients; call_rivals.py --list names all")
        if problem := RIVALS["gpu"][NEEDED].why_not(CASES[case]):
            raise SystemExit(problem)
    if shutil.which("ncu") is None:
        raise SystemExit("this needs ncu, which comes with CUDA, on the PATH")
    print("| " + " | ".join(["case", "pass", "kernel", "ms", "million cycles", *COLUMNS]) + " |")
    print("|---" * (5 + len(COLUMNS)) + "|")
    for case in asked.cases:
        for who in WHO:
            for part, counters in of_passes(profile(case, who).splitlines()).items():
                if part == "backward" or who != "ours, unordered":
                    print(row(case=case, who=who, part=part, counters=counters), flush=True)


if __name__ == "__main__":
    main()
