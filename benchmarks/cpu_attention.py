# SPDX-License-Identifier: Apache-2.0
"""How one device compares with jax.nn.dot_product_attention: time, what masks save, and temporary memory."""

import argparse

import jax
import numpy as np
from interleaved import Claim, medians, report
from measuring import prepare
from rivals import OURS, RIVALS
from workloads import BOTH, Shape, Workload

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    shape = Shape(1, arguments.tokens, arguments.heads, arguments.heads, arguments.head_size, "float32")
    causal, near = Workload(shape), Workload(shape, causal=False, window=(256, 0))
    workloads = {"causal": causal, "full": Workload(shape, causal=False), "window": near, "dense": causal}
    prepared = {
        f"{name} {part}": prepare(RIVALS["cpu"]["jax.nn" if name == "dense" else OURS], workload, part, 1)
        for part in BOTH
        for name, workload in workloads.items()
    }
    mine, theirs = (prepared[f"{name} forward"].results()[0] for name in ("causal", "dense"))
    difference = float(np.max(np.abs(mine - theirs)))
    memory = {name: (one.temporary or 0) / MIB for name, one in prepared.items()}
    runs = {name: one.call for name, one in prepared.items()}
    # Two measurements: the dense program allocates gigabytes, which slows the program that runs after it.
    time = medians({name: run for name, run in runs.items() if not name.startswith("dense")}, arguments.rounds)
    beside = medians(
        {name: run for name, run in runs.items() if name.startswith(("dense", "causal"))}, arguments.rounds
    )

    claims = [Claim("largest difference from dense", difference, "<=", 2e-5)]
    for part in BOTH:
        mine, theirs, full, window = (f"{name} {part}" for name in ("causal", "dense", "full", "window"))
        claims += [
            Claim(f"{part}: time over dense", beside[mine] / beside[theirs], "<=", 0.45, "x"),
            Claim(f"{part}: dense temporary memory over ours", memory[theirs] / memory[mine], ">=", 50, "x"),
            Claim(f"{part}: causal over full", time[mine] / time[full], "<=", 0.6, "x"),
            Claim(f"{part}: full over window 256", time[full] / time[window], ">=", 8, "x"),
        ]
    raw = {f"{name}, seconds": seconds for name, seconds in time.items()}
    raw |= {f"{name} beside dense, seconds": seconds for name, seconds in beside.items()}
    raw |= {f"{name}, temporary MiB": size for name, size in memory.items()}
    report("cpu_attention.py", claims, raw)


if __name__ == "__main__":
    main()
