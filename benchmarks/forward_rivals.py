# SPDX-License-Identifier: Apache-2.0
"""The forward pass alone, on one Hopper: the Hopper kernel, the portable one and FlashAttention-3 in turn.

`python forward_rivals.py` prints a table of milliseconds, for windows of several lengths, three head sizes, documents
and short sequences. The thresholds in `hopper.family.why_not_forward` come from it. `interleaved.py` explains
`sustained` and `burst`. Needs FlashAttention-3 (`flash_attention_3.py`). All programs are compiled before the first is
timed, one after the other: Triton's compiler fails in several threads.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Final

import flash_attention_3
import jax
from backward_rivals import block_of
from call_rivals import RIVAL
from interleaved import TIMINGS, both_timings
from measuring import TOLERANCES, relative
from ringattn_core.contract.protocol import Partial
from ringattn_triton.block_kernel import Family
from ringattn_triton.hopper import family as hopper
from ringattn_triton.launch.target import target
from ringattn_triton.portable import family as portable
from workloads import Shape, Workload

WINDOWS: Final = (128, 256, 512, 1024, 2048)
SHAPES: Final = {
    "32k, 16/8 heads of 128": Shape(1, 32768, 16, 8, 128),
    "b2 16k, 4/1 heads of 256": Shape(2, 16384, 4, 1, 256),
    "16k, 32/8 heads of 64": Shape(1, 16384, 32, 8, 64),
}
CASES: Final = {
    f"{name}, window {window}": Workload(shape, causal=False, window=(window - 1, 0), parts=("forward",))
    for name, shape in SHAPES.items()
    for window in WINDOWS
} | {
    "16k, 32/8 heads of 64, documents of 512": Workload(SHAPES["16k, 32/8 heads of 64"], document=512),
    "b8 2k, 32/8 heads of 64": Workload(Shape(8, 2048, 32, 8, 64)),
}
FAMILIES: Final[dict[str, Family]] = {"Hopper": hopper, "portable": portable}


def forward(family: Family, case: Workload, *arrays: jax.Array) -> Partial:
    """Output and log-sum-exp of a whole call by one family, also where the other one would be chosen."""
    return family.forward(block_of(case, arrays), None, target())


def programs(case: Workload) -> dict[str, Callable[..., Any]]:
    """Each forward pass as a function of query, key and value, which returns the output."""
    ours = {name: lambda *qkv, one=one: forward(one, case, *qkv).out for name, one in FAMILIES.items()}
    return {**ours, RIVAL: lambda *qkv: flash_attention_3.forward(case, *qkv)[0]}


def compiled(case: Workload) -> dict[str, jax.stages.Compiled]:
    """Compiles every program without making an array, so that the GPU rests meanwhile."""
    inputs = jax.eval_shape(case.shape.arrays)[:3]
    return {name: jax.jit(program).lower(*inputs).compile() for name, program in programs(case).items()}


def checked(case: Workload, made: Mapping[str, jax.stages.Compiled]) -> dict[str, Callable[[], Any]]:
    """The programs as functions without arguments. Raises if a result is not that of the rival."""
    inputs = case.shape.arrays()[:3]
    right = made[RIVAL](*inputs)
    for name, program in made.items():
        apart = relative(program(*inputs), right)
        if apart > TOLERANCES[case.shape.dtype]:
            raise SystemExit(f"{name} computes something else: it differs from {RIVAL} by {apart:.1e}")
    return {name: lambda one=one: one(*inputs) for name, one in made.items()}


def row(name: str, seconds: Mapping[str, Mapping[str, float]]) -> str:
    """A row of the table, milliseconds; `seconds` is what `both_timings` returns."""
    cells = (f"{1e3 * seconds[timing][who]:.3f}" for who in (*FAMILIES, RIVAL) for timing in TIMINGS)
    return " | ".join(["", name, *cells, ""]).strip()


def heading() -> str:
    names = [f"{who}, {timing}" for who in (*FAMILIES, RIVAL) for timing in TIMINGS]
    return "| " + " | ".join(["case (ms)", *names]) + " |\n|" + "---|" * (1 + len(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if jax.default_backend() != "gpu" or flash_attention_3.library() is None:
        raise SystemExit(f"this benchmark needs a Hopper GPU, and {RIVAL}: see flash_attention_3.py")
    made = {name: compiled(CASES[name]) for name in asked.only}
    print(jax.__version__, jax.devices()[0].device_kind)
    print(heading())
    for name, ready in made.items():
        print(row(name, both_timings(checked(CASES[name], ready), asked.rounds)), flush=True)


if __name__ == "__main__":
    main()
