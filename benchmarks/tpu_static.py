# SPDX-License-Identifier: Apache-2.0
"""What the compiler says of the TPU kernels and rings, beside JAX's splash attention and tokamax's, without a TPU."""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent / "packages" / "ringattn-tpu" / "tests"))

import jax.numpy as jnp
import numpy as np
from interleaved import Claim, report
from ringattn_tpu import block_sizes
from ringattn_tpu.steps import steps
from tpu_blocks import make_block
from tpu_programs import CHIPS
from tpu_reports import Report, compiled
from tpu_rivals import has_tokamax

LENGTHS: Final = (4096, 8192, 16384)
COMPARED: Final = ("v5e", "v6e", "7x")
CYCLES_OF_A_HOP: Final = 371_000
PEAK_MIB: Final = 449
LARGE: Final = {"length": 8192, "heads": 16}
"""The shape of those two targets, on v6e."""
OURS: Final = "block, one pass"

Programs = dict[str, tuple[str, dict[str, Any]]]


def kernels() -> Programs:
    """Everything whose bodies are compared."""
    found: Programs = {
        OURS: ("tpu_programs:block", {"length": 4096, "heads": 2}),
        "block, two passes": ("tpu_programs:block", {"length": 16384, "heads": 1}),
    }
    rivals: dict[str, dict[str, Any]] = {
        "splash": {"rival": "splash", "fused": False},
        "splash fused": {"rival": "splash", "fused": True},
    }
    if has_tokamax():
        rivals["tokamax"] = {"rival": "tokamax"}
    for name, options in rivals.items():
        for part in (512, 1024):
            found[f"{name}, {part}"] = ("tpu_rivals:program", {"length": 4096, "heads": 2, "part": part, **options})
    return found


def rings(lengths: tuple[int, ...], heads: int) -> Programs:
    return {
        f"{length}, {part}": ("tpu_programs:ring", {"length": length, "heads": heads, "backward": part == "gradients"})
        for length in lengths
        for part in ("forward", "gradients")
    }


def bundles(found: dict[str, Report]) -> dict[str, dict[str, tuple[int, int]]]:
    """By part and program: bundles of a tile of the shorter body, where all is visible, and of the one that masks.

    Those of several kernels are added up. Splash attention has one body, that masks always.
    """
    table: dict[str, dict[str, tuple[int, int]]] = {"forward": {}, "backward": {}}
    for name, one in found.items():
        bodies = {kernel: (span,) for kernel, span in one.spans.items()} if "splash" in name else one.bodies
        for part in table:
            mine = [(min(b), max(b)) for kernel, b in bodies.items() if is_forward(kernel) == (part == "forward")]
            if mine:
                table[part][name] = (sum(least for least, _ in mine), sum(most for _, most in mine))
    return table


def is_forward(kernel: str) -> bool:
    """By the names that each library gives: what is no gradient's is forward."""
    return not any(word in kernel for word in ("backward", "dkv", "dq", "bwd"))


def of_kernels(chip: str, found: dict[str, Report]) -> tuple[list[Claim], dict[str, float]]:
    claims, raw = [], {}
    for part, programs in bundles(found).items():
        for number, where in enumerate(("unmasked", "masked")):
            what = f"{chip}, {part}, {where}: bundles"
            raw |= {f"{what}, {name}": float(counts[number]) for name, counts in programs.items()}
            ours = min(counts[number] for name, counts in programs.items() if name == OURS)
            for rival in ("splash", "tokamax"):
                theirs = [counts[number] for name, counts in programs.items() if name.startswith(rival)]
                if theirs:
                    claims.append(Claim(f"{what} against {rival}", float(ours), "<=", float(min(theirs))))
    return claims, raw


def of_rings(chip: str, found: dict[str, Report]) -> tuple[list[Claim], dict[str, float]]:
    claims, raw = [], {}
    for name, one in found.items():
        hidden = 100 * (1 - len(one.exposed) / len(one.permutes))
        raw[f"{chip}, {name}: sends"] = float(len(one.permutes))
        raw[f"{chip}, {name}: MiB at the peak"] = one.peak / 2**20
        raw[f"{chip}, {name}: estimated cycles but for kernels"] = float(one.cycles)
        claims.append(Claim(f"{chip}, {name}: sends behind a kernel", hidden, ">=", 100.0, "%"))
    return claims, raw


def of_large(found: dict[str, Report]) -> list[Claim]:
    forward = found["forward"]
    hops = forward.kernels["ringattn_forward"]
    what = f"v6e, {LARGE['length']} tokens, {LARGE['heads']} heads, forward"
    return [
        Claim(f"{what}: cycles of a hop but for kernels", forward.cycles / hops, "<=", CYCLES_OF_A_HOP),
        Claim(f"{what}: MiB at the peak", forward.peak / 2**20, "<=", PEAK_MIB),
    ]


def of_window(found: dict[str, Report]) -> list[Claim]:
    """A layer that looks back 4096 of 128k tokens: how often its ring hops, and what it visits of its list of steps."""
    window, length = 4096, 32768
    block = make_block(1, length, length, 1, dtype=jnp.bfloat16, causal=True, window=(window, None))
    sizes = block_sizes.choose(block, block.rule.fwd_params)
    visited = int(steps(block, sizes.q_tile, sizes.kv_tile).length) * sizes.q_tile * sizes.kv_tile
    seen = int(np.minimum(np.arange(length), window).sum()) + length
    hops = found["window"].kernels["ringattn_forward"]
    return [
        Claim("a window of 4096 of 128k on 4 devices: hops", float(hops), "<=", 2.0),
        Claim("a window of 4096: visited over visible", visited / seen, "<=", 1.1, "x"),
    ]


def checked(chip: str, programs: Programs) -> dict[str, Report]:
    """The reports; a program that does not compile ends the benchmark."""
    found = {}
    for name, one in compiled(CHIPS[chip], programs).items():
        if isinstance(one, str):
            raise SystemExit(f"{name} does not compile for {chip}: {one[:1000]}")
        found[name] = one
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="*", default=list(CHIPS), choices=list(CHIPS))
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="tokens of each device")
    parser.add_argument("--heads", type=int, default=4, help="of the rings")
    parser.add_argument("--only", choices=("kernels", "rings", "large"), help="one family of claims")
    parser.add_argument("--workers", type=int, default=2, help="chips that are compiled for at once")
    arguments = parser.parse_args()
    if not has_tokamax():
        print("tokamax is not installed, so that only JAX's splash attention is compared with")
    window = {"length": 32768, "heads": 4, "sliding_window": [4096, None]}
    families: dict[str, tuple[tuple[str, ...], Programs]] = {
        "kernels": (COMPARED, kernels()),
        "rings": (tuple(CHIPS), rings(tuple(arguments.lengths), arguments.heads)),
        "large": (("v6e",), {"forward": ("tpu_programs:ring", LARGE), "window": ("tpu_programs:ring", window)}),
    }
    work = [
        (family, chip, programs)
        for family, (chips, programs) in families.items()
        for chip in chips
        if chip in arguments.chips and arguments.only in (None, family)
    ]
    claims: list[Claim] = []
    raw: dict[str, float] = {}
    with ThreadPoolExecutor(arguments.workers) as pool:
        for (family, chip, _), found in zip(work, pool.map(lambda one: checked(*one[1:]), work), strict=True):
            if family == "large":
                claims += of_large(found) + of_window(found)
                continue
            more, numbers = (of_kernels if family == "kernels" else of_rings)(chip, found)
            claims, raw = claims + more, raw | numbers
    report("tpu_static.py", claims, raw)


if __name__ == "__main__":
    main()
