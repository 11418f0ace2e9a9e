# SPDX-License-Identifier: Apache-2.0
"""How one device compares with jax.nn.dot_product_attention: time, what masks save, and temporary memory."""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from interleaved import Claim, medians, report
from programs import ours, temporary_bytes, with_gradients

MIB = 2**20


def dense(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    shape = (1, arguments.tokens, arguments.heads, arguments.head_size)
    query, key, value, dout = (jax.random.normal(seed, shape) for seed in jax.random.split(jax.random.key(0), 4))

    attentions = {"dense": dense, "causal": ours(causal=True), "full": ours(), "window": ours(sliding_window=(256, 0))}
    programs = {
        f"{name} forward": jax.jit(attend).lower(query, key, value).compile() for name, attend in attentions.items()
    }
    for name, attend in attentions.items():
        programs[f"{name} both"] = jax.jit(with_gradients(attend)).lower(query, key, value, dout).compile()
    memory = {name: temporary_bytes(program) / MIB for name, program in programs.items()}
    runs: dict[str, Callable[[], Any]] = {}
    for name, program in programs.items():
        inputs = (query, key, value) if name.endswith("forward") else (query, key, value, dout)
        runs[name] = lambda program=program, inputs=inputs: program(*inputs)
    difference = float(jnp.max(jnp.abs(runs["causal forward"]() - runs["dense forward"]())))
    # Two measurements: the dense program allocates gigabytes, which slows the program that runs after it.
    time = medians({name: run for name, run in runs.items() if not name.startswith("dense")}, arguments.rounds)
    beside = medians(
        {name: run for name, run in runs.items() if name.startswith(("dense", "causal"))}, arguments.rounds
    )

    claims = [Claim("largest difference from dense", difference, "<=", 2e-5)]
    for part in ("forward", "both"):
        label = "forward" if part == "forward" else "forward+backward"
        mine, theirs, full, window = (f"{name} {part}" for name in ("causal", "dense", "full", "window"))
        claims += [
            Claim(f"{label}: time over dense", beside[mine] / beside[theirs], "<=", 0.45, "x"),
            Claim(f"{label}: dense temporary memory over ours", memory[theirs] / memory[mine], ">=", 50, "x"),
            Claim(f"{label}: causal over full", time[mine] / time[full], "<=", 0.6, "x"),
            Claim(f"{label}: full over window 256", time[full] / time[window], ">=", 8, "x"),
        ]
    raw = {f"{name}, seconds": seconds for name, seconds in time.items()}
    raw |= {f"{name} beside dense, seconds": seconds for name, seconds in beside.items()}
    raw |= {f"{name}, temporary MiB": size for name, size in memory.items()}
    report("cpu_attention.py", claims, raw)


if __name__ == "__main__":
    main()
