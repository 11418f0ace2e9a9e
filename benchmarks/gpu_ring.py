# SPDX-License-Identifier: Apache-2.0
"""How much of one GPU's rate each GPU of a ring keeps, beside the other strategies and an all-gather by hand.

Causal, in the order of `--layout`. "gather" is an all-gather written in JAX around a call on one device; "all_gather"
and "ulysses" are strategies of `ring_attention`, and "auto" is the one that the cost model chooses: it may differ with
gradients. "alone" is one GPU with the tokens of one rank. In "apart" all GPUs do that at the same time and exchange
nothing: GPUs of one kind differ by some percent, and a ring is as fast as its slowest.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from interleaved import ON_A_DEVICE, Claim, medians, report
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from programs import Attention, ours, with_gradients
from ringattn_core import ring_attention, to_layout

WORK = {"forward": 1.0, "forward+backward": 3.5}


STRATEGIES = ("ring", "all_gather", "ulysses", "auto")


def gathered(mesh: Mesh, backend: str, layout: str) -> Attention:
    """All-gathers keys and values, then runs one kernel."""
    ranks, spec = mesh.size, PartitionSpec(None, "sp")

    def local(query: jax.Array, key: jax.Array, value: jax.Array, where: jax.Array) -> jax.Array:
        key, value, all_where = (jax.lax.all_gather(x, "sp", axis=1, tiled=True) for x in (key, value, where))
        return ring_attention(
            query, key, value, causal=True, q_positions=where, kv_positions=all_where, backend=backend, axis_name=()
        )

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        where = to_layout(jnp.arange(query.shape[1], dtype=jnp.int32)[None], layout, ranks)
        return jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)(query, key, value, where)

    return attend


def compiled(attend: Attention, arrays: tuple[jax.Array, ...], part: str) -> tuple[Callable[[], Any], str]:
    """A function that runs the compiled program on its arrays, and the program before XLA has compiled it."""
    inputs = arrays[:3] if part == "forward" else arrays
    lowered = jax.jit(attend if part == "forward" else with_gradients(attend)).lower(*inputs)
    program = lowered.compile()
    return lambda: program(*inputs), lowered.as_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 65536, 131072], help="of the whole ring")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--layout", default="zigzag", choices=("zigzag", "striped"))
    parser.add_argument("--rounds", type=int, default=5)
    beside = (*STRATEGIES[1:], "gather")
    parser.add_argument("--beside", nargs="*", default=beside, choices=beside, help="what the ring is measured beside")
    arguments = parser.parse_args()
    names = ("ring", *arguments.beside)
    ranks = len(jax.devices())
    if jax.default_backend() != "gpu" or ranks < 2:
        raise SystemExit("this benchmark needs several GPUs in one process")
    mesh = Mesh(np.array(jax.devices()), ("sp",))
    every = Mesh(np.array(jax.devices()), ("dp",))
    claims, raw = [], {}
    for tokens in arguments.tokens:
        sizes = {**dict.fromkeys(names, tokens), "alone": tokens // ranks, "apart": tokens // ranks}
        seeds = jax.random.split(jax.random.key(0), 4)
        places = {
            **dict.fromkeys(names, NamedSharding(mesh, PartitionSpec(None, "sp"))),
            "alone": jax.devices()[0],
            "apart": NamedSharding(every, PartitionSpec("dp")),
        }
        arrays = {}
        for name, length in sizes.items():
            shape = (ranks if name == "apart" else 1, length, arguments.heads, arguments.head_size)
            numbers = (jax.random.normal(seed, shape).astype(jnp.bfloat16) for seed in seeds)
            arrays[name] = tuple(jax.device_put(x, places[name]) for x in numbers)
        over_mesh: dict[str, Any] = dict(layout=arguments.layout, mesh=mesh, axis_name="sp")
        attentions = {
            name: gathered(mesh, arguments.backend, arguments.layout)
            if name == "gather"
            else ours(backend=arguments.backend, causal=True, strategy=name, **over_mesh)
            for name in names
        }
        attentions["alone"] = ours(backend=arguments.backend, causal=True)
        attentions["apart"] = ours(backend=arguments.backend, causal=True, mesh=every)
        for part, work in WORK.items():
            made = {name: compiled(attend, arrays[name], part) for name, attend in attentions.items()}
            runs = {name: run for name, (run, _) in made.items()}
            time = medians(runs, arguments.rounds, least=ON_A_DEVICE)
            rates = {}
            for name, seconds in time.items():
                pairs = sizes[name] ** 2 / 2 / (1 if name in ("alone", "apart") else ranks)
                rates[name] = 4 * arguments.heads * arguments.head_size * pairs * work / 1e12 / seconds
                raw[f"{tokens} tokens, {part}: {name}, TFLOP/s of a GPU"] = rates[name]
            measured = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
            print(f"{tokens} tokens, {part}, TFLOP/s of a GPU: {measured}", file=sys.stderr, flush=True)
            target = 0.8 if tokens < 65536 else 0.9
            what = f"{tokens} tokens, {part}: ring over"
            claims.append(Claim(f"{what} alone", rates["ring"] / rates["alone"], ">=", target, "x"))
            claims.append(Claim(f"{what} apart", rates["ring"] / rates["apart"], ">=", target, "x"))
            if "gather" in rates:
                claims.append(Claim(f"{what} gather", rates["ring"] / rates["gather"], ">=", 1.0, "x"))
            if "auto" in rates:
                others = {name: rates[name] for name in STRATEGIES if name != "auto" and name in rates}
                best = max(others.values())
                raw[f"{tokens} tokens, {part}: auto over the best"] = rates["auto"] / best
                for name in others:
                    if made[name][1] == made["auto"][1]:
                        raw[f"{tokens} tokens, {part}: {name}, which auto runs, over the best"] = others[name] / best
    report("gpu_ring.py", claims, raw)


if __name__ == "__main__":
    main()
