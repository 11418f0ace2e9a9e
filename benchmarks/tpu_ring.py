# SPDX-License-Identifier: Apache-2.0
"""How much of their peak the TPUs of a ring reach, beside splash attention, an all-gather, and tokamax's ring.

`--interpret` runs every part of this script on a CPU, in sizes that say nothing about time.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, Final

if "--interpret" in sys.argv:
    os.environ |= {"JAX_PLATFORMS": "cpu", "RINGATTN_TPU_INTERPRET": "1"}
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from gpu_ring import WORK, compiled, gathered
from interleaved import ON_A_DEVICE, Claim, medians, report
from jax.sharding import NamedSharding, PartitionSpec
from programs import Attention, ours
from ringattn_core import ring_mesh
from tpu_rivals import has_tokamax, of_tokens, splash, tokamax_ring

PEAKS: Final = {"v5 lite": 197.0, "v5e": 197.0, "v5p": 459.0, "v5": 459.0, "v6": 918.0, "7x": 1153.5}
"""TFLOP/s of a device in bfloat16, by a part of the name of its kind. A chip of 7x is two devices."""


def peak(kind: str) -> float:
    """The peak TFLOP/s of one device."""
    for name, rate in PEAKS.items():
        if name in kind:
            return rate
    raise SystemExit(f"the peak of a {kind} is not known here: pass --peak in TFLOP/s")


def pairs(length: int, causal: bool) -> float:
    return length * (length + 1) / 2 if causal else float(length) ** 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 65536, 131072], help="of the whole ring")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", type=float, help="TFLOP/s of a device in bfloat16, where its kind is not known")
    parser.add_argument("--interpret", action="store_true", help="a dry run on a CPU")
    arguments = parser.parse_args()
    if not arguments.interpret and jax.default_backend() != "tpu":
        sys.exit("This benchmark needs TPUs, and JAX sees none here; --interpret makes a dry run on a CPU.")
    rivals: dict[str, Any] = {"tile": 128, "part": 128, "interpret": True} if arguments.interpret else {}
    if arguments.interpret:
        arguments.tokens, arguments.heads, arguments.rounds = [1024], 2, 1
    of_device = arguments.peak or (1.0 if arguments.interpret else peak(jax.devices()[0].device_kind))
    mesh = ring_mesh(jax.devices())
    if not has_tokamax():
        print("tokamax is not installed: its ring is left out")
    claims: list[Claim] = []
    raw: dict[str, float] = {}
    for tokens in arguments.tokens:
        found = measured(mesh, tokens, arguments, rivals)
        if arguments.interpret:
            print(f"A dry run on a CPU: {', '.join(found['forward'])} ran, forward and with gradients. No time counts.")
            return
        for part, seconds in found.items():
            rates = {}
            for name, taken in seconds.items():
                length, causal = (tokens // mesh.size if name == "splash" else tokens), name != "tokamax"
                devices = 1 if name == "splash" else mesh.size
                work = 4 * arguments.heads * arguments.head_size * pairs(length, causal) * WORK[part]
                rates[name] = 100 * work / taken / 1e12 / devices / of_device
                raw[f"{tokens} tokens, {part}: {name}, % of the peak"] = rates[name]
            what = f"{tokens} tokens, {part}: ring over"
            targets = {"splash": 0.9, "gather": 1.0, "tokamax": 1.0}
            claims += [
                Claim(f"{what} {name}", rates["ring"] / rates[name], ">=", target, "x")
                for name, target in targets.items()
                if name in rates
            ]
    report("tpu_ring.py", claims, raw)


def measured(mesh: Any, tokens: int, arguments: Any, rivals: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The median seconds of each candidate, forward and with gradients. Splash runs on one device, with one shard."""
    split = NamedSharding(mesh, PartitionSpec(None, "sp"))
    alone = tokens // mesh.size

    def arrays(length: int, place: Any) -> tuple[jax.Array, ...]:
        shape = (1, length, arguments.heads, arguments.head_size)
        seeds = jax.random.split(jax.random.key(0), 4)
        return tuple(jax.device_put(jax.random.normal(seed, shape).astype(jnp.bfloat16), place) for seed in seeds)

    whole, part_of_one = arrays(tokens, split), arrays(alone, jax.devices()[0])
    attentions: dict[str, Attention] = {
        "ring": ours(backend="tpu", causal=True, layout="zigzag", mesh=mesh, axis_name="sp"),
        "gather": gathered(mesh, "tpu"),
        "splash": of_tokens(splash(alone, arguments.heads, **rivals)),
    }
    if has_tokamax():
        attentions["tokamax"] = of_tokens(tokamax_ring(mesh, tokens, **rivals))
    found = {}
    for part in WORK:
        runs: dict[str, Callable[[], Any]] = {
            name: compiled(attend, part_of_one if name == "splash" else whole, part)[0]
            for name, attend in attentions.items()
        }
        found[part] = medians(runs, arguments.rounds, least=0.0 if arguments.interpret else ON_A_DEVICE)
    return found


if __name__ == "__main__":
    main()
