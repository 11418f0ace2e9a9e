# SPDX-License-Identifier: Apache-2.0
"""What bounds the Hopper kernels: hardware counters of ours and of FlashAttention-3's, by NVIDIA's profiler `ncu`.

`python kernel_counters.py causal d192` prints a row for each pass of each case of `call_rivals.py`. Every figure but
the times is a percentage of the kernel's cycles: in which the tensor cores computed, in which shared memory answered,
in which of these for the operands of products and in which for loads and stores of threads, how many it repeated
because of conflicts between banks, in which an instruction was issued, in which the second-level cache received data,
and in which it added.
"""

import argparse
import csv
import os
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
PASSES: Final = ("backward", "forward")
"""The two longest kernels of a call, the longest first."""


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


def of_kernels(printed: Iterable[str]) -> list[dict[str, float]]:
    """The counters of each kernel, in the order in which they ran. Lines before the table are the profiler's own."""
    lines = list(printed)
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    kernels: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines[start:]):
        kernels.setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return list(kernels.values())


def of_passes(kernels: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The counters of both passes of the second call."""
    second = kernels[len(kernels) // 2 :]
    longest = sorted(second, key=lambda counters: -counters[NANOSECONDS])
    return dict(zip(PASSES, longest, strict=False))


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
    if shutil.which("ncu") is None:
        raise SystemExit("this needs ncu, which comes with CUDA, on the PATH")
    print("| " + " | ".join(["case", "pass", "kernel", "ms", "million cycles", *COLUMNS]) + " |")
    print("|---" * (5 + len(COLUMNS)) + "|")
    for case in asked.cases:
        for who in WHO:
            for part, counters in of_passes(of_kernels(profile(case, who).splitlines())).items():
                if part == PASSES[0] or who != "ours, unordered":
                    print(row(case=case, who=who, part=part, counters=counters), flush=True)


if __name__ == "__main__":
    main()
