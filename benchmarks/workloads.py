# SPDX-License-Identifier: Apache-2.0
"""The shapes and masks that the benchmarks measure, and which of them belong to each suite."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

PARTS: Final = ("forward", "forward+backward", "decode")
BOTH: Final = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"
    value_size: int | None = None
    """The head size of the values, if it is not `head_size`."""

    def arrays(self, queries: int | None = None) -> tuple[jax.Array, ...]:
        """Query, key, value, and the cotangent of the output; `queries` query tokens, or as many as keys."""
        seeds = jax.random.split(jax.random.key(0), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        lengths = (queries or self.tokens, self.tokens, self.tokens, queries or self.tokens)
        sizes = (self.head_size, self.head_size, self.values, self.values)
        return tuple(
            jax.random.normal(seed, (self.batch, *shape)).astype(self.dtype)
            for seed, *shape in zip(seeds, lengths, heads, sizes, strict=True)
        )

    @property
    def values(self) -> int:
        """The head size of the values."""
        return self.value_size or self.head_size

    def tera(self, part: str, share: float) -> float:
        """Floating-point operations in units of 10^12, if queries see this share of the keys."""
        square = self.batch * self.heads * self.tokens**2 * share / 1e12
        # Forward: scores and output. Backward: scores again, their gradient from values, and dv, dq, dk.
        forward, backward = 2 * (self.head_size + self.values), 2 * (3 * self.head_size + 2 * self.values)
        return square * (forward + backward if part == "forward+backward" else forward)


MAIN: Final = Shape(1, 16384, 16, 16, 128)
GROUPED: Final = Shape(2, 8192, 32, 8, 128)
NARROW: Final = Shape(1, 16384, 32, 32, 64)
LONG: Final = Shape(1, 65536, 8, 8, 128)
PACKED: Final = Shape(1, 32768, 16, 16, 128)
EXACT: Final = Shape(1, 4096, 8, 8, 64, "float32")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A shape, what its queries see, and which passes over which rings are measured."""

    shape: Shape
    causal: bool = True
    window: tuple[int, int] | None = None
    documents: tuple[int, ...] = ()
    """The lengths of the documents of a sequence, which add up to its tokens; empty without documents."""
    sinks: bool = False
    parts: tuple[str, ...] = BOTH
    rings: tuple[int, ...] = (1,)

    @property
    def decode(self) -> bool:
        """Whether one new token of each sequence reads a cache of `shape.tokens` keys."""
        return self.parts == ("decode",)

    @property
    def pairs(self) -> int:
        """The visible pairs of a query and a key, in one sequence."""
        if self.decode:
            return self.shape.tokens
        tokens = self.shape.tokens
        lengths = np.array(self.documents or (tokens,))
        ends = np.repeat(np.cumsum(lengths), lengths)
        earlier = np.arange(tokens) - (ends - np.repeat(lengths, lengths))
        before, after = self.window or (tokens, tokens)
        later = 0 if self.causal else np.minimum(ends - 1 - np.arange(tokens), after)
        return int((np.minimum(earlier, before) + 1 + later).sum())

    @property
    def share(self) -> float:
        """The visible pairs over all pairs of a square mask."""
        return self.pairs / self.shape.tokens**2

    def tera(self, part: str) -> float:
        """The floating-point operations of a part, in units of 10^12."""
        return self.shape.tera(part, self.share)

    def ids(self) -> jax.Array | None:
        """The document of each token.

        In a traced function the compiler does not see them, as in a training step, whose ids come with the data.
        """
        if not self.documents:
            return None
        tokens = jnp.asarray(np.repeat(np.arange(len(self.documents), dtype=np.int32), self.documents))
        return jax.lax.optimization_barrier(jnp.broadcast_to(tokens, (self.shape.batch, self.shape.tokens)))

    def extras(self) -> tuple[jax.Array, ...]:
        """The arrays of a call after query, key and value: sinks."""
        return (jnp.linspace(-1.0, 1.0, self.shape.heads),) if self.sinks else ()

    def options(self) -> dict[str, Any]:
        """The mask as options of `ring_attention`."""
        options: dict[str, Any] = {"causal": self.causal, "sliding_window": self.window}
        return options | {"q_segment_ids": self.ids(), "kv_segment_ids": self.ids()}


CASES: Final = {
    "causal": Workload(MAIN),
    "full": Workload(MAIN, causal=False),
    "grouped": Workload(GROUPED),
    "grouped short": Workload(Shape(8, 4096, 32, 8, 128)),
    "d64": Workload(NARROW),
    "d96": Workload(Shape(1, 16384, 16, 16, 96)),
    "d256": Workload(Shape(2, 8192, 8, 8, 256)),
    "short": Workload(Shape(8, 2048, 16, 16, 128)),
    "window": Workload(LONG, causal=False, window=(4096, 0)),
    "documents": Workload(PACKED, documents=(2048,) * 16),
    "ragged": Workload(dataclasses.replace(MAIN, tokens=16037)),
    "sinks": Workload(MAIN, sinks=True),
    "full, rows of 512": Workload(Shape(128, 512, 12, 12, 64), causal=False),
    "full, rows of 1024": Workload(Shape(64, 1024, 16, 16, 64), causal=False),
}
"""The workloads by which the kernels for one GPU are tuned."""

LENGTHS: Final = "length"
"""The first word of the workloads that differ in length only; the plots against length are drawn from them."""


def drawn(tokens: int, most: int) -> tuple[int, ...]:
    """Lengths of documents of 1 to `most` tokens, drawn evenly, until a sequence of so many `tokens` is full."""
    numbers, found = np.random.default_rng(0), []
    while (rest := tokens - sum(found)) > 0:
        found.append(min(rest, int(numbers.integers(1, most + 1))))
    return tuple(found)


def lengths(heads: int, kv_heads: int, head_size: int, dtype: str, tokens: tuple[int, ...]) -> dict[str, Workload]:
    return {f"{LENGTHS} {n}": Workload(Shape(1, n, heads, kv_heads, head_size, dtype)) for n in tokens}


ON_A_GPU: Final = {
    "Llama-3 8B": Workload(Shape(2, 8192, 32, 8, 128)),
    "Llama-3 70B": Workload(Shape(1, 8192, 64, 8, 128)),
    "Gemma-3 1B, window 512": Workload(Shape(2, 32768, 4, 1, 256), causal=False, window=(511, 0)),
    "Gemma-3 27B, window 1024": Workload(Shape(1, 32768, 32, 16, 128), causal=False, window=(1023, 0)),
    "gpt-oss, sinks": Workload(Shape(1, 8192, 64, 8, 64), sinks=True),
    "gpt-oss, sinks, window 128": Workload(Shape(1, 8192, 64, 8, 64), sinks=True, causal=False, window=(127, 0)),
    "Qwen3, 64 heads on 4": Workload(Shape(1, 16384, 64, 4, 128)),
    "8 heads on 1": Workload(Shape(1, 65536, 8, 1, 128)),
    "DeepSeek, 192 and 128": Workload(Shape(1, 16384, 16, 16, 192, value_size=128)),
    "documents of 2048": Workload(Shape(1, 32768, 32, 8, 128), documents=(2048,) * 16),
    "documents of up to 8192": Workload(Shape(1, 65536, 32, 8, 128), documents=drawn(65536, 8192)),
    "prefill of 131072": Workload(Shape(1, 131072, 32, 8, 128), parts=("forward",)),
    "decode, cache of 32768": Workload(Shape(1, 32768, 64, 8, 128), parts=("decode",)),
    "decode, cache of 131072": Workload(Shape(1, 131072, 64, 8, 128), parts=("decode",)),
    "decode, 16 caches of 32768": Workload(Shape(16, 32768, 64, 8, 128), parts=("decode",)),
    **lengths(16, 16, 128, "bfloat16", (1024, 2048, 4096, 8192, 16384, 32768)),
}
RINGS: Final = (1, 2, 4, 8)
ON_RINGS: Final = {
    "ring of 32768 tokens": Workload(Shape(1, 32768, 32, 8, 128), rings=RINGS),
    "ring of 131072 tokens": Workload(Shape(1, 131072, 32, 8, 128), rings=RINGS),
    "ring without a mask": Workload(Shape(1, 32768, 16, 16, 128), causal=False, rings=RINGS),
}
ON_A_CPU: Final = {
    "Llama-3 8B": Workload(Shape(1, 1024, 32, 8, 128, "float32")),
    "Llama-3 70B": Workload(Shape(1, 512, 64, 8, 128, "float32")),
    "Gemma-3 1B, window 512": Workload(Shape(1, 2048, 4, 1, 256, "float32"), causal=False, window=(511, 0)),
    "gpt-oss, sinks": Workload(Shape(1, 1024, 64, 8, 64, "float32"), sinks=True),
    "documents of 512": Workload(Shape(1, 2048, 8, 2, 128, "float32"), documents=(512,) * 4),
    "prefill of 8192": Workload(Shape(1, 8192, 4, 1, 128, "float32"), parts=("forward",)),
    "decode, cache of 32768": Workload(Shape(1, 32768, 32, 8, 128, "float32"), parts=("decode",)),
    **lengths(4, 1, 128, "float32", (512, 1024, 2048, 4096)),
    "ring of 4096 tokens": Workload(Shape(1, 4096, 4, 1, 128, "float32"), rings=RINGS),
    "ring in bfloat16": Workload(Shape(1, 1024, 4, 1, 128), rings=RINGS, parts=("forward+backward",)),
}
SUITES: Final = {
    "cpu": ON_A_CPU,
    "gpu": ON_A_GPU | CASES,
    "gpus": ON_RINGS,
    "tpu": ON_A_GPU | ON_RINGS,
}
