# SPDX-License-Identifier: Apache-2.0
"""The backward pass alone, on one Hopper: one pass, ordered or not, two passes, FlashAttention-3 and cuDNN in turn.

`python backward_rivals.py causal documents`, or no name for all. FlashAttention-3 takes part where
`FLASH_ATTENTION_3` names its library (`flash_attention_3.py`). `bits` repeats one call and compares the bits.
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import flash_attention_3
import jax
import jax.numpy as jnp
import numpy as np
from interleaved import seconds_of
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.hopper import backward as one_pass
from ringattn_triton.launch.target import target
from ringattn_triton.portable.family import PORTABLE


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape and its mask; `share` of all pairs are visible."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    share: float = 0.5
    causal: bool = True
    window: tuple[int, int] | None = None
    document: int = 0
    """The length of a document; 0 without documents."""

    def block(self) -> Block:
        """A block of random inputs, as on a ring of one."""
        index = jnp.arange(self.tokens, dtype=jnp.int32)[None]
        ids = jnp.broadcast_to(index // self.document, (self.batch, self.tokens)) if self.document else None
        rule = Rule(scale=self.dim**-0.5, causal=self.causal, window=self.window)
        q, k, v = (self.drawn(seed, heads) for seed, heads in enumerate((self.heads, self.kv_heads, self.kv_heads)))
        fields: dict[str, Any] = dict.fromkeys(("bias", "mask", "slopes", "seed"))
        return Block(
            q=q, kv=(k, v), q_positions=index, kv_positions=index, q_index=index, kv_index=index,
            batch_index=jnp.arange(self.batch), head_index=jnp.arange(self.heads), q_segments=ids, kv_segments=ids,
            rule=rule, final=True, **fields,
        )  # fmt: skip

    def drawn(self, seed: int, heads: int) -> jax.Array:
        shape = (self.batch, self.tokens, heads, self.dim)
        return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)

    def rival(self) -> dict[str, Any]:
        """The mask as arguments of FlashAttention-3."""
        found: dict[str, Any] = {"causal": self.causal, "window": self.window or (-1, -1)}
        if self.document:
            starts = jnp.arange(0, self.tokens + 1, self.document, dtype=jnp.int32)
            found |= {"starts": starts, "longest": self.document}
        return found


CASES = {
    "causal": Case(1, 16384, 16, 16, 128),
    "full": Case(1, 16384, 16, 16, 128, share=1.0, causal=False),
    "grouped": Case(2, 8192, 32, 8, 128),
    "d64": Case(1, 16384, 32, 32, 64),
    "short": Case(8, 2048, 16, 16, 128),
    "window": Case(1, 65536, 8, 8, 128, share=4097 / 65536, causal=False, window=(4096, 0)),
    "documents": Case(1, 32768, 16, 16, 128, share=1024 / 32768, document=2048),
    "ragged": Case(1, 16037, 16, 16, 128),
}


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
    found = PORTABLE.backward(block, dout, lse, delta_of(dout, out), None, target())
    return found.dq, found.dk, found.dv


def candidates(case: Case) -> dict[str, Callable[[], Any]]:
    """Every backward pass that can run the case, on the same inputs."""
    block, dout = case.block(), case.drawn(3, case.heads)
    done = jax.jit(KERNEL.forward)(block, None)
    given = block, dout, done.out.astype(jnp.bfloat16), done.lse
    runs: dict[str, Callable[[], Any]] = {
        "unordered": lambda: one(*given, True),
        "ordered": lambda: one(*given, False),
        "two passes": lambda: two(*given),
    }
    if flash_attention_3.installed():
        rival = jax.jit(lambda *arrays: flash_attention_3.backward(arrays, **case.rival()))
        runs["FlashAttention-3"] = lambda: rival(dout, block.q, block.k, block.v, *given[2:])
    if not case.window and not case.document:
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn")  # pyright: ignore[reportArgumentType]
        _, transposed = jax.vjp(attend, block.q, block.k, block.v)
        cudnn = jax.jit(lambda x: transposed(x))
        runs["cuDNN"] = lambda: cudnn(dout)
    return runs


def measure(name: str, case: Case, rounds: int) -> None:
    """Prints the errors of each candidate against our two passes, and its median and least time."""
    runs = candidates(case)
    right = [np.asarray(x, np.float32) for x in runs["two passes"]()]
    for who, run in runs.items():
        found = [np.asarray(x, np.float32) for x in run()]
        wrong = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(found, right, strict=True)]
        print(f"{name:10s} {who:18s} dq, dk, dv beside two passes:", *(f"{x:.5f}" for x in wrong), flush=True)
    times: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(rounds):
        for who, run in runs.items():
            seconds_of(run, 8)
            times[who].append(seconds_of(run, 8))
    tera = 5 * 2 * case.batch * case.heads * case.tokens**2 * case.dim * case.share / 1e12
    for who, seconds in times.items():
        middle, least = statistics.median(seconds), min(seconds)
        rate = f"{tera / middle:4.0f} TFLOP/s"
        print(f"{name:10s} {who:18s} {1e3 * middle:7.3f} ms, least {1e3 * least:7.3f}, {rate}", flush=True)


def compare_bits(times: int = 20) -> None:
    """Prints how often a repeated call of each form gives equal bits."""
    runs = candidates(Case(1, 4096, 8, 8, 128))
    for who in ("ordered", "unordered", "two passes"):
        first = [np.asarray(x).view(np.uint16) for x in runs[who]()]
        again = ([np.asarray(x).view(np.uint16) for x in runs[who]()] for _ in range(times))
        same = sum(all(np.array_equal(x, y) for x, y in zip(one, first, strict=True)) for one in again)
        print(f"{who} repeats its bits {same} times of {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["bits", *CASES])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(jax.__version__, jax.devices()[0].device_kind)
    for name in asked.cases:
        compare_bits() if name == "bits" else measure(name, CASES[name], asked.rounds)


if __name__ == "__main__":
    main()
