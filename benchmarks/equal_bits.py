# SPDX-License-Identifier: Apache-2.0
"""How many calls, drawn at random, have the bits of one device under "ulysses" and "all_gather", in contiguous order.

`python equal_bits.py triton --calls 100`: each call is drawn from the domains of the conformance suite, with heads that
the ranks divide, and runs on rings of 2, 4 and 8 in turn; where there are fewer devices, one device plays all ranks,
which launch their kernels one after another as they would on devices of their own. Without `--sizes` kernels choose
their tile sizes; with it the call fixes them. Prints each call that differs, then the counts of each result.
"""

import argparse
import collections
import dataclasses
import random
import time
from typing import Any

import numpy as np
from ringattn_conformance import domains
from ringattn_conformance.cases import Case, of_entry
from ringattn_conformance.outcomes import features_of
from ringattn_conformance.ranks import Placement, place, run

RINGS = (2, 4, 8)


def drawn(seed: int, ring: int, asked: argparse.Namespace) -> Case:
    """A call whose heads and lengths the ranks divide; about every fourth has `--long` tokens."""
    rng = random.Random(seed)
    entry = domains.draw(seed)
    case = of_entry({"name": f"drawn-{seed}"} | entry)
    kv_heads = ring * rng.choice((1, 1, 2))
    large = rng.random() < 0.25
    step = ring * (case.selected_size if case.selected else 1)  # a block of chosen keys lies on one rank
    length = -(-(asked.long if large else min(max(case.q_length, 16), 512, asked.long)) // step) * step
    cross = case.q_length != case.kv_length and rng.random() < 0.5
    bias = case.bias if case.bias is None or asked.shared_bias or "N" in case.bias else case.bias + "N"
    return dataclasses.replace(
        case,
        dtype=rng.choice(asked.dtypes),
        batch=1 if large else min(case.batch, 2),
        q_length=length,
        kv_length=-(-length // 2 // step) * step if cross else length,
        kv_heads=kv_heads,
        heads=kv_heads * rng.choice((1, 2, 4)),
        head_dim=rng.choice((64, 128)) if large else min(case.head_dim, 160),
        value_dim=0,
        bias=None if bias is None else "".join(axis for axis in "BNT" if axis in bias),
        dense_mask=None if large else case.dense_mask,
        block_size=asked.sizes,
        forward=False,
        fused_backward=False,
    )


def differing(case: Case, ring: int, strategy: str, backend: str, forward: bool = False) -> dict[str, float]:
    """For each result that differs from that of one device: the largest difference. Zeros of either sign are equal."""
    case = dataclasses.replace(case, value_dim=case.head_dim)
    gradients = strategy == "ulysses" and not forward
    found = run(place(case, Placement(ring, strategy=strategy), backend), gradients)
    alone = run(place(case, Placement(1), backend), gradients)
    pairs = {name: (np.float32(x), np.float32(alone[name])) for name, x in found.items()}
    return {
        n: float(np.nanmax(np.abs(a - b))) for n, (a, b) in pairs.items() if not np.array_equal(a, b, equal_nan=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first call")
    parser.add_argument("--sizes", type=int, help="the tile size that every call fixes, for queries and keys")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--strategies", nargs="+", default=["ulysses", "all_gather"])
    parser.add_argument("--shared-bias", action="store_true", help="draw also biases that all heads share")
    parser.add_argument("--forward", action="store_true", help="compare no gradients, which compiles faster")
    parser.add_argument("--long", type=int, default=2048)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no call after this time")
    asked = parser.parse_args()
    counts: Any = collections.Counter()
    began, features = time.monotonic(), features_of(asked.backend)
    for seed in range(asked.first, asked.first + asked.calls):
        ring = RINGS[seed % len(RINGS)]
        case = drawn(seed, ring, asked).within(features)
        for strategy in asked.strategies:
            if time.monotonic() - began > 60 * asked.minutes:
                break
            try:
                wrong = differing(case, ring, strategy, asked.backend, asked.forward)
            except Exception as error:
                counts[strategy, "failed to run"] += 1
                print(f"{seed} {strategy} of {ring}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                continue
            counts[strategy, "calls"] += 1
            counts[strategy, "equal"] += not wrong
            counts.update((strategy, f"{name} differs") for name in wrong)
            if wrong:
                print(f"{seed} {strategy} of {ring}: {wrong} in {case.changes}", flush=True)
    for (strategy, what), count in sorted(counts.items()):
        print(f"{strategy}: {what}: {count}")


if __name__ == "__main__":
    main()
