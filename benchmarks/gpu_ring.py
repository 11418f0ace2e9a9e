# SPDX-License-Identifier: Apache-2.0
"""How much of one GPU's rate each GPU of a ring keeps, beside the other strategies and an all-gather by hand.

Causal, in the order of `--layout`. "gather" is an all-gather written in JAX around a call on one device; "all_gather",
"ulysses" and "auto" are strategies of `ring_attention`. "two_levels", for four GPUs and more, is a ring of pairs of
GPUs. "balance" is a ring of contiguous arrays with `balance="zigzag"`. "alone" is one GPU with the tokens of one rank.
In "apart" all GPUs do that at the same time and exchange nothing: GPUs of one kind differ by some percent, and a ring
is as fast as its slowest. With `--documents N`, a row holds documents of `N` tokens, and calls promise that as
`max_distance`. With `--window` or `--documents`, compare the milliseconds. With `--prefix 0.25`, the first quarter of
each row sees itself whole, by `kv_range`. With `--selected 16x128`, each query and key head chooses 16 blocks of 128
keys, independently of the others: the longer the row, the fewer of a tile's pairs are chosen, so compare milliseconds.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from interleaved import ON_A_DEVICE, Attention, Claim, medians, report, with_gradients
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattn_core import ring_attention, to_layout
from selected import independent, pairs

Programs = Mapping[str, tuple[Callable[[], Any], str]]
Rates = Mapping[str, float]
WORK = {"forward": 1.0, "forward+backward": 3.5}
STRATEGIES = ("ring", "all_gather", "ulysses", "auto")
TWO_LEVELS = "two_levels"
BALANCE = "balance"
BESIDE = (*STRATEGIES[1:], "gather")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A function, and where its inputs of `batch` rows and so many `tokens` lie."""

    attend: Attention
    place: Any
    tokens: int
    batch: int = 1

    def arrays(self, asked: argparse.Namespace) -> tuple[jax.Array, ...]:
        """Query, key, value, and the cotangent of the output."""
        heads, kv_heads = asked.heads, asked.kv_heads or asked.heads
        seeds = jax.random.split(jax.random.key(0), 4)
        shapes = [(self.batch, self.tokens, count, asked.head_size) for count in (heads, kv_heads, kv_heads, heads)]
        numbers = [jax.random.normal(*each).astype(jnp.bfloat16) for each in zip(seeds, shapes, strict=True)]
        return tuple(jax.device_put(x, self.place) for x in numbers)


def gathered(mesh: Mesh, backend: str, layout: str = "zigzag") -> Attention:
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


def masked(asked: argparse.Namespace, **options: Any) -> Attention:
    """`ring_attention` with the mask that the command line asks for, unless `options` have another window.

    XLA does not see ids and ranges, as in a training step, where they come with the data.
    """
    if asked.prefix and (asked.window or asked.documents or asked.selected):
        raise SystemExit("--prefix is for calls without a window, documents and chosen blocks")
    window = None if asked.window is None else (asked.window, 0)
    options = {"causal": True, "backend": asked.backend, "sliding_window": window} | options
    if asked.sinks:
        options["softmax_aux"] = jnp.zeros(asked.heads)
    mesh = options.get("mesh")
    order = options.get("layout", "contiguous"), 1 if mesh is None else mesh.size

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        index = jnp.arange(query.shape[1], dtype=jnp.int32)

        def by_query(x: jax.Array) -> jax.Array:
            every_row = jnp.broadcast_to(x, (len(query), *x.shape))
            return jax.lax.optimization_barrier(to_layout(every_row, *order))

        given: dict[str, Any] = {}
        if asked.documents is not None:
            given |= {"q_segment_ids": by_query(index // asked.documents), "max_distance": (asked.documents - 1, 0)}
        if asked.prefix:
            length = int(asked.prefix * query.shape[1])
            last = jnp.where(index < length, length - 1, index)
            given |= {"causal": False, "kv_range": (by_query(jnp.zeros_like(index)), by_query(last))}
        if asked.selected:
            ids = chosen(len(index), asked.kv_heads or asked.heads, *asked.selected)
            given |= {"selected": by_query(jnp.asarray(ids)), "selected_size": asked.selected[1]}
        return ring_attention(query, key, value, **options | given)

    return attend


@functools.cache
def chosen(tokens: int, kv_heads: int, count: int, size: int) -> np.ndarray:
    """The ids of blocks that each query and key head chooses, in natural order."""
    return independent(tokens, kv_heads, count, size)


def visible_pairs(asked: argparse.Namespace, one: Candidate) -> float:
    """How many pairs of query and key a candidate computes."""
    length = min(asked.documents or one.tokens, one.tokens)
    before = min(asked.window or length, length)
    seen = one.batch * one.tokens / length * (length * before - before**2 / 2)
    if asked.prefix:
        seen += one.batch * (asked.prefix * one.tokens) ** 2 / 2
    if asked.selected:
        seen *= pairs(chosen(one.tokens, asked.kv_heads or asked.heads, *asked.selected), asked.selected[1])
    return seen


def count_and_size(text: str) -> tuple[int, int]:
    """The two numbers of "16x128"."""
    count, size = map(int, text.split("x"))
    return count, size


def add_masks(parser: argparse.ArgumentParser, window: int | None) -> None:
    """Adds the arguments that `masked` reads; `window` is the default of `--window`."""
    parser.add_argument("--window", type=int, default=window, help="how many keys before its own a query sees")
    parser.add_argument("--documents", type=int, help="the length of each document of a row")
    parser.add_argument("--prefix", type=float, default=0.0, help="the share of a row in which tokens see each other")
    parser.add_argument("--selected", type=count_and_size, help="blocks that a query chooses, and their size: 16x128")
    parser.add_argument("--sinks", action="store_true", help="one sink for each head")


def compiled(attend: Attention, arrays: tuple[jax.Array, ...], part: str) -> tuple[Callable[[], Any], str]:
    """A function that runs the compiled program on its arrays, and the program before XLA has compiled it."""
    inputs = arrays[:3] if part == "forward" else arrays
    lowered = jax.jit(attend if part == "forward" else with_gradients(attend)).lower(*inputs)
    program = lowered.compile()
    return lambda: program(*inputs), lowered.as_text()


def candidates(asked: argparse.Namespace, tokens: int) -> dict[str, Candidate]:
    """The ring, what it is measured beside, one GPU alone, and all GPUs apart; `tokens` are those of the whole ring."""
    devices = np.array(jax.devices())
    flat, apart = Mesh(devices, ("sp",)), Mesh(devices, ("dp",))

    def sharded(mesh: Mesh, **options: Any) -> Candidate:
        axes = mesh.axis_names
        attend = masked(asked, **{"layout": asked.layout, "mesh": mesh, "axis_name": axes} | options)
        return Candidate(attend, NamedSharding(mesh, PartitionSpec(None, axes)), tokens)

    found = {name: sharded(flat, strategy=name) for name in STRATEGIES if name == "ring" or name in asked.beside}
    if "gather" in asked.beside:
        found["gather"] = dataclasses.replace(found["ring"], attend=gathered(flat, asked.backend, asked.layout))
    if TWO_LEVELS in asked.beside:
        found[TWO_LEVELS] = sharded(Mesh(devices.reshape(-1, 2), ("outer", "inner")))
    if BALANCE in asked.beside:
        found[BALANCE] = sharded(flat, layout="contiguous", balance="zigzag")
    share = tokens // len(devices)
    found["alone"] = Candidate(masked(asked), devices[0], share)
    found["apart"] = Candidate(
        masked(asked, mesh=apart), NamedSharding(apart, PartitionSpec("dp")), share, len(devices)
    )
    return found


def compared(what: str, rates: Rates, least: float) -> list[Claim]:
    """What the ring promises beside one GPU alone, all GPUs apart, and a gather by hand."""
    targets = {"alone": least, "apart": least, "gather": 1.0}
    return [
        Claim(f"{what}: ring over {name}", rates["ring"] / rates[name], ">=", target, "x")
        for name, target in targets.items()
        if name in rates
    ]


def choice(what: str, rates: Rates, programs: Programs) -> dict[str, float]:
    """The rate of "auto" over that of the best strategy, and the same of each strategy whose very program it runs."""
    if "auto" not in rates:
        return {}
    others = {name: rates[name] for name in STRATEGIES if name != "auto" and name in rates}
    best = max(others.values())
    same = [name for name in others if programs[name][1] == programs["auto"][1]]
    found = {f"{what}: auto over the best": rates["auto"] / best}
    return found | {f"{what}: {name}, which auto runs, over the best": others[name] / best for name in same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 65536, 131072], help="of the whole ring")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="as many as --heads unless given")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--layout", default="zigzag", choices=("contiguous", "zigzag", "striped"))
    add_masks(parser, window=None)
    parser.add_argument("--rounds", type=int, default=5)
    others = (*BESIDE, TWO_LEVELS, BALANCE)
    parser.add_argument("--beside", nargs="*", default=BESIDE, choices=others, help="what the ring is measured beside")
    asked = parser.parse_args()
    ranks = len(jax.devices())
    if jax.default_backend() != "gpu" or ranks < 2:
        raise SystemExit("this benchmark needs several GPUs in one process")
    if TWO_LEVELS in asked.beside and (ranks < 4 or ranks % 2):
        raise SystemExit(f"{TWO_LEVELS} needs four GPUs or more, an even number")
    not_plain_causal = asked.window, asked.documents, asked.prefix, asked.selected, asked.sinks
    if any(not_plain_causal) and "gather" in asked.beside:
        raise SystemExit("the gather by hand is causal only: name what else the ring is measured beside")
    if asked.documents and asked.layout != "contiguous":
        raise SystemExit("--documents needs --layout contiguous")
    claims, raw = [], {}
    for tokens in asked.tokens:
        found = candidates(asked, tokens)
        arrays = {name: one.arrays(asked) for name, one in found.items()}
        for part, work in WORK.items():
            what = f"{tokens} tokens, {part}"
            programs = {name: compiled(one.attend, arrays[name], part) for name, one in found.items()}
            time = medians({name: run for name, (run, _) in programs.items()}, asked.rounds, least=ON_A_DEVICE)
            rates = {}
            for name, seconds in time.items():
                flops = 4 * asked.heads * asked.head_size * visible_pairs(asked, found[name]) * work
                rates[name] = flops / 1e12 / seconds / (1 if name == "alone" else ranks)
            measured = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
            print(f"{what}, TFLOP/s of a GPU: {measured}", file=sys.stderr, flush=True)
            raw |= {f"{what}: {name}, TFLOP/s of a GPU": rate for name, rate in rates.items()}
            raw |= {f"{what}: {name}, ms": 1e3 * seconds for name, seconds in time.items()}
            claims += compared(what, rates, 0.8 if tokens < 65536 else 0.9)
            raw |= choice(what, rates, programs)
    report("gpu_ring.py", claims, raw)


if __name__ == "__main__":
    main()
