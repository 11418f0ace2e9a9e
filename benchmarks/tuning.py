# SPDX-License-Identifier: Apache-2.0
"""Whether tuning finds the best of a sweep of all tile sizes, what it gains, and what its lookup costs a call."""

import argparse
import os
import tempfile
import time
import timeit
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from interleaved import Claim, medians, report
from programs import ours, with_gradients
from ringattn_core.backends import discovery
from ringattn_core.call.validation import validated
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.tuning import choice, forget
from ringattn_core.tuning.problem import of_call
from ringattn_tools.search import tune
from ringattn_tools.trial import trial
from ringattn_xla.tiling import cut as tile

SIZES = (64, 128, 256, 512, 1024)
"""The sizes of the sweep, for keys, and for queries times the heads of a group."""
MOST_SCORES = 2**19
"""The most scores of a tile in the sweep: twice the limit of the candidates."""
SHAPES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], str, Mapping[str, Any]]] = {
    "causal": ((1, 1024, 4, 64), (1, 1024, 4, 64), "float32", {"causal": True}),
    "full": ((1, 1024, 8, 64), (1, 1024, 8, 64), "float32", {}),
    "window": ((1, 2048, 2, 64), (1, 2048, 2, 64), "float32", {"sliding_window": (256, 0)}),
    "grouped": ((1, 1024, 8, 32), (1, 1024, 2, 32), "float32", {"causal": True}),
    "bfloat16": ((1, 1024, 4, 64), (1, 1024, 4, 64), "bfloat16", {"causal": True}),
}


def sizes_of_sweep(q_length: int, kv_length: int, group: int) -> list[dict[str, int]]:
    """One pair of sizes for each distinct way to cut the block into tiles."""
    found = {}
    for q in (size // group for size in SIZES):
        for kv in SIZES:
            cut = tile(q_length, q), tile(kv_length, kv)
            if cut[0] * cut[1] * group <= MOST_SCORES:
                found.setdefault(cut, {"q_blocksize": q, "kv_blocksize": kv})
    return list(found.values())


def program(part: str, arrays: Sequence[jax.Array], dout: jax.Array, cfg: Any, options: Mapping[str, Any]) -> Any:
    """Compiles a call, forward or with every gradient; returns a function that runs it."""
    attend = ours(cfg=cfg, backend="xla", **options)
    if part == "forward":
        compiled = jax.jit(attend).lower(*arrays).compile()
        return lambda: compiled(*arrays)
    compiled = jax.jit(with_gradients(attend)).lower(*arrays, dout).compile()
    return lambda: compiled(*arrays, dout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="causal")
    parser.add_argument("--rounds", type=int, default=5, help="of the sweep")
    parser.add_argument("--duel", type=int, default=31, help="rounds of the comparison of what both chose")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    os.environ["RINGATTN_CACHE_DIR"] = tempfile.mkdtemp()
    os.environ["RINGATTN_AUTOTUNE"] = "off"
    of_q, of_kv, dtype, options = SHAPES[arguments.shape]
    seeds = jax.random.split(jax.random.key(0), 4)
    query, key, value, dout = (
        jax.random.normal(seed, shape, dtype) for seed, shape in zip(seeds, (of_q, of_kv, of_kv, of_q), strict=True)
    )
    arrays = query, key, value
    call, registration = validated(*arrays, **options), discovery.get("xla")
    problem = of_call(registration, call, 1)

    start = time.perf_counter()
    tuned = tune(problem, registration).config
    seconds_of_tuning = time.perf_counter() - start

    sizes = sizes_of_sweep(of_q[1], of_kv[1], of_q[2] // of_kv[2])
    made = trial(registration.implementation(), problem, jax.devices()[0])
    forward = {str(number): made.forward(FwdParams.of(each)) for number, each in enumerate(sizes)}
    whole = forward["0"]()
    backward = {str(number): made.backward(BwdParams.of(each), whole) for number, each in enumerate(sizes)}
    swept = []
    for programs in (forward, backward):
        times = medians(programs, arguments.rounds)
        swept.append(sizes[int(min(times, key=times.__getitem__))])
    best = RingAttentionConfig(*swept)

    raw = {"tuning, seconds": seconds_of_tuning}
    claims = []
    for part in ("forward", "both"):
        chosen = {"tuned": tuned, "sweep": best, "default": RingAttentionConfig()}
        duel = medians(
            {name: program(part, arrays, dout, cfg, options) for name, cfg in chosen.items()}, arguments.duel
        )
        raw |= {f"{part}: {name}, ms": 1e3 * seconds for name, seconds in duel.items()}
        claims.append(
            Claim(f"{part}: tuned over the best of the sweep", duel["tuned"] / duel["sweep"], "<=", 1.03, "x")
        )
        claims.append(Claim(f"{part}: tuned over the default", duel["tuned"] / duel["default"], "<=", 1.03, "x"))

    os.environ["RINGATTN_AUTOTUNE"] = "cached"
    lookup = min(timeit.repeat(lambda: choice.with_parameters(registration, call), number=100, repeat=99)) / 100
    first = min(timeit.repeat(lambda: choice.with_parameters(registration, call), forget, number=1, repeat=99))
    claims.append(Claim("a call looks it up in", 1e6 * lookup, "<=", 50, "us"))
    raw["a first call looks it up on the disk in, us"] = 1e6 * first
    print(f"\ntuned: {tuned.to_json()}\nsweep: {best.to_json()}")
    report(f"tuning.py --shape {arguments.shape}", claims, raw)


if __name__ == "__main__":
    main()
