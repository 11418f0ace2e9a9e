# SPDX-License-Identifier: Apache-2.0
"""The backward pass alone, on one Hopper: one pass, ordered or not, two passes, FlashAttention-3 and cuDNN in turn.

`python backward_rivals.py causal documents`, or no name for the cases of `workloads.py` and d192.
FlashAttention-3 takes part where `FLASH_ATTENTION_3` names its library (`flash_attention_3.py`). Each time is printed
sustained and in bursts, which `interleaved.py` explains. `bits` repeats one call and compares the bits.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import flash_attention_3
import jax
import jax.numpy as jnp
import numpy as np
from call_rivals import ALL, DEFAULT, RIVAL
from interleaved import TIMINGS, both_timings
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.hopper import backward as one_pass
from ringattn_triton.launch.target import target
from ringattn_triton.portable import backward as two_passes
from workloads import Shape, Workload

KNOWN: Final = {name: case for name, case in ALL.items() if not case.sinks and "forward+backward" in case.parts}


def block_of(case: Workload, arrays: Sequence[jax.Array]) -> Block:
    """A block of query, key and value, as on a ring of one."""
    shape = case.shape
    q, k, v = arrays
    index = jnp.arange(shape.tokens, dtype=jnp.int32)[None]
    rule = Rule(softmax_scale=shape.head_size**-0.5, causal=case.causal, sliding_window=case.window)
    fields: dict[str, Any] = dict.fromkeys(("bias", "mask", "slopes", "seed"))
    return Block(
        q=q, kv=(k, v), q_positions=index, kv_positions=index, q_index=index, kv_index=index,
        batch_index=jnp.arange(shape.batch), head_index=jnp.arange(shape.heads), q_segments=case.ids(),
        kv_segments=case.ids(), rule=rule, final=True, **fields,
    )  # fmt: skip


def delta_of(dout: jax.Array, out: jax.Array) -> jax.Array:
    return jnp.swapaxes((dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1), 1, 2)


def _with(block: Block, fused: bool) -> Block:
    return dataclasses.replace(block, rule=dataclasses.replace(block.rule, fused_backward=fused))


@functools.partial(jax.jit, static_argnums=4)
def one(block: Block, dout: jax.Array, out: jax.Array, lse: jax.Array, fused: bool) -> tuple[jax.Array, ...]:
    """dq, dk, dv by our one-pass kernel, summed in any order if `fused`. Computes `delta` too, as its rivals do."""
    found = one_pass.backward(_with(block, fused), dout, lse, delta_of(dout, out), None)
    return found.dq, found.dk, found.dv


@jax.jit
def two(block: Block, dout: jax.Array, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, ...]:
    found = two_passes.backward(block, dout, lse, delta_of(dout, out), None, target())
    return found.dq, found.dk, found.dv


def candidates(case: Workload) -> dict[str, Callable[[], Any]]:
    """Every backward pass that can run the case, on the same inputs."""
    *inputs, dout = case.shape.arrays()
    block = block_of(case, inputs)
    done = jax.jit(KERNEL.forward)(block, None)
    given = block, dout, done.out.astype(jnp.bfloat16), done.lse
    runs: dict[str, Callable[[], Any]] = {
        "unordered": lambda: one(*given, True),
        "ordered": lambda: one(*given, False),
        "two passes": lambda: two(*given),
    }
    if flash_attention_3.library() is not None:
        rival = jax.jit(lambda *arrays: flash_attention_3.backward(case, arrays))
        runs[RIVAL] = lambda: rival(dout, block.q, block.k, block.v, *given[2:])
    if not case.window and not case.document:
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn")  # pyright: ignore[reportArgumentType]
        try:
            _, transposed = jax.vjp(attend, block.q, block.k, block.v)
        except (NotImplementedError, ValueError) as error:
            print(f"cuDNN refuses: {error}", flush=True)
            return runs
        cudnn = jax.jit(lambda x: transposed(x))
        runs["cuDNN"] = lambda: cudnn(dout)
    return runs


def measure(name: str, case: Workload, rounds: int) -> None:
    """Prints the errors of each candidate against our two passes, and its median times."""
    runs = candidates(case)
    right = [np.asarray(x, np.float32) for x in runs["two passes"]()]
    for who, run in runs.items():
        found = [np.asarray(x, np.float32) for x in run()]
        wrong = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(found, right, strict=True)]
        print(f"{name:10s} {who:18s} dq, dk, dv beside two passes:", *(f"{x:.5f}" for x in wrong), flush=True)
    seconds = both_timings(runs, rounds)
    for who in runs:
        print(f"{name:10s} {who:18s} {row(who, seconds, 2.5 * case.tera('forward'))}", flush=True)


def row(who: str, seconds: Mapping[str, Mapping[str, float]], tera: float) -> str:
    """The milliseconds and the rate of one candidate in each timing, and its time over FlashAttention-3's."""
    found = []
    for timing in TIMINGS:
        mine, rival = seconds[timing][who], seconds[timing].get(RIVAL)
        over = "" if rival is None else f", {mine / rival:.2f} of {RIVAL}'s time"
        found.append(f"{timing} {1e3 * mine:7.3f} ms, {tera / mine:4.0f} TFLOP/s{over}")
    return "; ".join(found)


def compare_bits(times: int = 20) -> None:
    """Prints how often a repeated call of each form gives equal bits."""
    runs = candidates(Workload(Shape(1, 4096, 8, 8, 128)))
    for who in ("ordered", "unordered", "two passes"):
        first = [np.asarray(x).view(np.uint16) for x in runs[who]()]
        again = ([np.asarray(x).view(np.uint16) for x in runs[who]()] for _ in range(times))
        same = sum(all(np.array_equal(x, y) for x, y in zip(one, first, strict=True)) for one in again)
        print(f"{who} repeats its bits {same} times of {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["bits", *(name for name in DEFAULT if name in KNOWN)])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    unknown = [name for name in asked.cases if name not in ("bits", *KNOWN)]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are bits, {', '.join(KNOWN)}")
    print(jax.__version__, jax.devices()[0].device_kind)
    for name in asked.cases:
        compare_bits() if name == "bits" else measure(name, KNOWN[name], asked.rounds)


if __name__ == "__main__":
    main()
