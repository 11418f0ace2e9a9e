# SPDX-License-Identifier: Apache-2.0
"""What a group of window layers and a global layer costs on several GPUs, by the order of the tokens and the strategy.

All layers of a model share one order of tokens, so a plan is a layout, and a strategy for each kind of layer. The
script prints the milliseconds of one window layer, of one global layer, and of a group, `--locals` window layers and a
global one. With `--documents N`, every row holds documents of `N` tokens, whose ids XLA does not see.
"""

import argparse
from collections.abc import Mapping
from typing import Final

import jax
import numpy as np
from gpu_ring import WORK, Candidate, add_masks, compiled, masked
from interleaved import ON_A_DEVICE, medians, report
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PLANS: Final[Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]] = {
    "contiguous, auto": ({"strategy": "auto"}, {"strategy": "auto"}),
    "contiguous, ring": ({}, {"balance": "zigzag"}),
    "contiguous, ulysses": ({"strategy": "ulysses"}, {"strategy": "ulysses"}),
    "zigzag, ring": ({}, {}),
    "striped, ring": ({}, {}),
}
"""By name, which begins with the layout: the options of window layers, and those of global layers."""


def candidates(asked: argparse.Namespace, tokens: int, window: int | None) -> dict[str, Candidate]:
    """Each plan's layer with this window, or its global layer."""
    mesh = Mesh(np.array(jax.devices()), ("sp",))
    place = NamedSharding(mesh, PartitionSpec(None, "sp"))
    found = {}
    for name in asked.plans:
        options = {"sliding_window": None if window is None else (window, 0), **PLANS[name][window is None]}
        if asked.documents is not None:
            options.pop("balance", None)  # the order of the documents balances the ranks
        attend = masked(asked, mesh=mesh, axis_name="sp", layout=name.split(",")[0], **options)
        found[name] = Candidate(attend, place, tokens)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 131072], help="of the whole ring")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="as many as --heads unless given")
    parser.add_argument("--head-size", type=int, default=128)
    add_masks(parser, window=1023)
    parser.add_argument("--locals", type=int, default=5, help="how many window layers a group has")
    parser.add_argument("--plans", nargs="*", default=[*PLANS], choices=PLANS)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        raise SystemExit("this benchmark needs several GPUs in one process")
    raw = {}
    print("| tokens | plan | part | window layer, ms | global layer, ms | group, ms |\n|---|---|---|---|---|---|")
    for tokens in asked.tokens:
        for part in WORK:
            seconds: dict[str, dict[str, float]] = {}
            for kind, window in (("window", asked.window), ("global", None)):
                found = candidates(asked, tokens, window)
                arrays = next(iter(found.values())).arrays(asked)
                programs = {name: compiled(one.attend, arrays, part)[0] for name, one in found.items()}
                seconds[kind] = medians(programs, asked.rounds, least=ON_A_DEVICE)
            for name, of_global in seconds["global"].items():
                times = seconds["window"][name], of_global, asked.locals * seconds["window"][name] + of_global
                print(
                    f"| {tokens} | {name} | {part} | " + " | ".join(f"{1e3 * x:.3g}" for x in times) + " |", flush=True
                )
                raw[f"{tokens} tokens, {part}: {name}, ms of a group"] = 1e3 * times[-1]
    report("mixed_layers.py", [], raw)


if __name__ == "__main__":
    main()
