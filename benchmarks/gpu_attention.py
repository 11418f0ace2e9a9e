# SPDX-License-Identifier: Apache-2.0
"""How fast attention is on one GPU: TFLOP/s beside cuDNN, what masks save, what options cost, float32 beside XLA.

TFLOP/s count half of all pairs for a causal mask, and 3.5 times the forward for forward+backward.
`--only options` prints what options cost twice: sustained and in bursts, which `interleaved.py` explains.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from interleaved import ON_A_DEVICE, Attention, Claim, both_timings, medians, ours, report, with_gradients
from ringattn_core import masks
from workloads import CASES, EXACT, GROUPED, LONG, MAIN, NARROW, PACKED, Shape

PARTS = ("forward", "forward+backward")
OPTIONS = ("soft cap 30", "bias", "ALiBi", "dropout 0.1", "max logits")
PARTS_OF_RUN = ("speed", "masks", "options", "sparse", "float32")


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An attention function, and its arguments after query, key and value: sinks and bias, differentiated too."""

    attend: Attention
    extras: tuple[jax.Array | None, ...] = ()


def run(candidate: Candidate, shape: Shape, part: str) -> Callable[[], Any]:
    """Compiles the program; returns a function that runs it on its arrays."""
    query, key, value, dout = shape.arrays()
    inputs, program = (query, key, value, *candidate.extras), candidate.attend
    if part != "forward":
        inputs, program = (*inputs, dout), with_gradients(candidate.attend)
    compiled = jax.jit(program).lower(*inputs).compile()
    return lambda: compiled(*inputs)


class Table:
    """Measures, and collects the raw numbers and the claims."""

    def __init__(self, backend: str, rounds: int) -> None:
        self.backend, self.rounds = backend, rounds
        self.claims: list[Claim] = []
        self.raw: dict[str, float] = {}

    def ours(self, *extras: jax.Array | None, **options: Any) -> Candidate:
        return Candidate(ours(backend=self.backend, **options), extras)

    def measured(self, candidates: Mapping[str, Candidate], shape: Shape, part: str) -> dict[str, float]:
        return medians({name: run(one, shape, part) for name, one in candidates.items()}, self.rounds, ON_A_DEVICE)

    def speed(self, name: str, shape: Shape, targets: tuple[float, float]) -> None:
        """Our rate alone, against a target; and our rate in turns with cuDNN on a GPU that both heat, over cuDNN's."""
        for part, target in zip(PARTS, targets, strict=True):
            mine = {"ours": self.ours(causal=True)}
            alone = self.measured(mine, shape, part)["ours"]
            beside = self.measured({**mine, "cudnn": Candidate(cudnn)}, shape, part)
            rates = {"alone": alone, "beside cudnn": beside["ours"], "of cudnn": beside["cudnn"]}
            self.raw |= {f"{name} {part}, {who}, TFLOP/s": shape.tera(part, 0.5) / x for who, x in rates.items()}
            self.raw[f"{name} {part}, rate over that of cudnn"] = beside["cudnn"] / beside["ours"]
            self.claims.append(Claim(f"{name} {part}", shape.tera(part, 0.5) / alone, ">=", target, "TFLOP/s"))

    def against_causal(self, name: str, shape: Shape, candidate: Candidate, share: float) -> None:
        """The time with a mask over the causal time, divided by `share`: its visible pairs over the causal ones."""
        for part in PARTS:
            time = self.measured({"causal": self.ours(causal=True), name: candidate}, shape, part)
            self.raw |= {f"{name} {part}: {who}, ms": 1e3 * seconds for who, seconds in time.items()}
            ratio = time[name] / time["causal"] / share
            self.claims.append(Claim(f"{name} {part}: time over visible share", ratio, "<=", 1.3, "x"))

    def cost(self, what: str, options: Mapping[str, Candidate], limits: Mapping[str, float], shape: Shape) -> None:
        """The time with each option over the time without options, all causal. `limits` are for sustained times."""
        candidates = {"nothing": self.ours(causal=True), **options}
        made = {part: {name: run(one, shape, part) for name, one in candidates.items()} for part in PARTS}
        for part, runs in made.items():
            for timing, time in both_timings(runs, self.rounds).items():
                self.raw |= {f"{what}, {name} {part}, {timing}, ms": 1e3 * x for name, x in time.items()}
                over = {name: time[name] / time["nothing"] for name in options}
                self.raw |= {f"{what}, {name} {part}, {timing}, over nothing": x for name, x in over.items()}
                if timing == "sustained":
                    for name, limit in limits.items():
                        self.claims.append(Claim(f"{what}, {name} {part}: time with", over[name], "<=", limit, "x"))

    def sparse(self, shape: Shape, limit: float) -> None:
        """The time with a mask that shows a scattered tenth of the tiles, over the time of full attention."""

        def tenth(q: Any, kv: Any) -> Any:
            q_tile, kv_tile = q // 128, kv // 128
            return (q_tile == kv_tile) | ((q_tile * 7 + kv_tile * 3) % 10 == 0)

        sparse = self.ours(mask_builder=lambda *_: masks.Predicate(tenth))
        for part in PARTS:
            time = self.measured({"full": self.ours(), "sparse": sparse}, shape, part)
            self.raw |= {f"a tenth of the tiles {part}: {who}, ms": 1e3 * x for who, x in time.items()}
            ratio = time["sparse"] / time["full"]
            self.claims.append(Claim(f"a tenth of the tiles {part}: time over full", ratio, "<=", limit, "x"))

    def exact(self, shape: Shape, least: float) -> None:
        candidates = {"ours": self.ours(causal=True), "xla": Candidate(ours(backend="xla", causal=True))}
        for part in PARTS:
            time = self.measured(candidates, shape, part)
            self.raw |= {f"float32 {part}: {who}, ms": 1e3 * seconds for who, seconds in time.items()}
            self.claims.append(Claim(f"float32 {part}: xla over ours", time["xla"] / time["ours"], ">=", least, "x"))


def options(table: Table, shape: Shape, names: Sequence[str]) -> dict[str, Candidate]:
    """The options of these names, each alone; the bias is differentiated, as `Candidate` says."""

    def made(name: str) -> Candidate:
        match name:
            case "soft cap 30":
                return table.ours(causal=True, logits_soft_cap=30.0)
            case "bias":
                bias = jax.random.normal(jax.random.key(1), (1, 1, shape.tokens, shape.tokens), jnp.bfloat16)
                return table.ours(None, bias, causal=True)
            case "ALiBi":
                slopes = 2.0 ** -(8.0 * jnp.arange(1, shape.heads + 1) / shape.heads)
                return table.ours(causal=True, alibi_slopes=slopes)
            case "max logits":
                both = table.ours(causal=True, return_max_logits=True).attend
                # The barrier keeps XLA from dropping the second result.
                return Candidate(lambda *arrays: jax.lax.optimization_barrier(both(*arrays))[0])
            case _:
                return table.ours(causal=True, dropout_prob=0.1, dropout_seed=7)

    return {name: made(name) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=PARTS_OF_RUN, choices=PARTS_OF_RUN)
    parser.add_argument("--options", nargs="*", default=OPTIONS, choices=OPTIONS, help="for --only options")
    parser.add_argument(
        "--head-sizes", nargs="*", type=int, default=[128, 64], choices=[128, 64], help="for --only options"
    )
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("this benchmark needs a GPU, and JAX sees none in this process")
    table = Table(arguments.backend, arguments.rounds)
    if "speed" in arguments.only:
        table.speed("16k h16 d128 causal", MAIN, (500, 440))
        table.speed("GQA 32/8 b2 8k d128 causal", GROUPED, (460, 400))
        table.speed("16k h32 d64 causal", NARROW, (400, 350))
    if "masks" in arguments.only:
        window, tokens = 4096, LONG.tokens
        visible = window * (tokens - window / 2) / (tokens**2 / 2)
        table.against_causal("window 4096 of 64k", LONG, table.ours(sliding_window=(window - 1, 0)), visible)
        packed = CASES["documents"]
        # Its ids are made while the program is traced, so that XLA does not see them.
        documents = Candidate(lambda *arrays: table.ours(**packed.options()).attend(*arrays))
        table.against_causal("documents of 2k in 32k", PACKED, documents, 1 / 16)
        table.against_causal("sinks", MAIN, table.ours(jnp.zeros(MAIN.heads), causal=True), 1.0)
    if "options" in arguments.only:
        limits = {"soft cap 30": 1.15, "bias": 1.4, "dropout 0.1": 1.5, "max logits": 1.02}
        for shape in (MAIN, NARROW):
            if shape.head_size in arguments.head_sizes:
                found = options(table, shape, arguments.options)
                limits_here = {name: limit for name, limit in limits.items() if name in found and shape == MAIN}
                table.cost(f"d{shape.head_size}", found, limits_here, shape)
    if "sparse" in arguments.only:
        table.sparse(MAIN, 0.25)
    if "float32" in arguments.only:
        table.exact(EXACT, 2.0)
    report("gpu_attention.py", table.claims, table.raw)


if __name__ == "__main__":
    main()
