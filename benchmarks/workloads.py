# SPDX-License-Identifier: Apache-2.0
"""The shapes and masks that the benchmarks measure, and which of them belong to each suite."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

WORK: Final = {"forward": 1.0, "forward+backward": 3.5, "decode": 1.0}
"""The matrix products of each part, in units of those of the forward pass."""
BOTH: Final = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"

    def arrays(self, queries: int | None = None) -> tuple[jax.Array, ...]:
        """Query, key, value, and the cotangent of the output; `queries` query tokens, or as many as keys."""
        seeds = jax.random.split(jax.random.key(0), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        lengths = (queries or self.tokens, self.tokens, self.tokens, queries or self.tokens)
        return tuple(
            jax.random.normal(seed, (self.batch, length, count, self.head_size)).astype(self.dtype)
            for seed, count, length in zip(seeds, heads, lengths, strict=True)
        )

    def tera(self, part: str, share: float) -> float:
        """Floating-point operations in units of 10^12, if queries see this share of the keys."""
        square = 4 * self.batch * self.heads * self.tokens**2 * self.head_size
        return square * share * WORK[part] / 1e12


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
    document: int = 0
    """The length of a document; 0 without documents."""
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
        length = self.document or self.shape.tokens
        before, after = self.window or (length, length)
        index = np.arange(length)
        later = 0 if self.causal else np.minimum(length - 1 - index, after)
        return int((np.minimum(index, before) + 1 + later).sum()) * (self.shape.tokens // length)

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
        if not self.document:
            return None
        tokens = jnp.arange(self.shape.tokens, dtype=jnp.int32) // self.document
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
    "documents": Workload(PACKED, document=2048),
    "ragged": Workload(dataclasses.replace(MAIN, tokens=16037)),
    "sinks": Workload(MAIN, sinks=True),
}
"""The workloads by which the kernels for one GPU are tuned."""

LENGTHS: Final = "length"
"""The first word of the workloads that differ in length only; the plots against length are drawn from them."""


def lengths(heads: int, kv_heads: int, head_size: int, dtype: str, tokens: tuple[int, ...]) -> dict[str, Workload]:
    return {f"{LENGTHS} {n}": Workload(Shape(1, n, heads, kv_heads, head_size, dtype)) for n in tokens}


ON_A_GPU: Final = {
    "Llama-3 8B": Workload(Shape(2, 8192, 32, 8, 128)),
    "Llama-3 70B": Workload(Shape(1, 8192, 64, 8, 128)),
    "Gemma-3 1B, window 512": Workload(Shape(2, 32768, 4, 1, 256), causal=False, window=(511, 0)),
    "Gemma-3 27B, window 1024": Workload(Shape(1, 32768, 32, 16, 128), causal=False, window=(1023, 0)),
    "gpt-oss, sinks": Workload(Shape(1, 8192, 64, 8, 64), sinks=True),
    "gpt-oss, sinks, window 128": Workload(Shape(1, 8192, 64, 8, 64), sinks=True, causal=False, window=(127, 0)),
    "documents of 2048": Workload(Shape(1, 32768, 32, 8, 128), document=2048),
    "prefill of 131072": Workload(Shape(1, 131072, 32, 8, 128), parts=("forward",)),
    "decode, cache of 131072": Workload(Shape(1, 131072, 32, 8, 128), parts=("decode",)),
    "decode, 32 caches of 8192": Workload(Shape(32, 8192, 32, 8, 128), parts=("decode",)),
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
    "documents of 512": Workload(Shape(1, 2048, 8, 2, 128, "float32"), document=512),
    "prefill of 8192": Workload(Shape(1, 8192, 4, 1, 128, "float32"), parts=("forward",)),
    "decode, cache of 32768": Workload(Shape(1, 32768, 32, 8, 128, "float32"), parts=("decode",)),
    **lengths(4, 1, 128, "float32", (512, 1024, 2048, 4096)),
    "ring of 4096 tokens": Workload(Shape(1, 4096, 4, 1, 128, "float32"), rings=RINGS),
    "ring in bfloat16": Workload(Shape(1, 1024, 4, 1, 128), rings=RINGS, parts=("forward+backward",)),
}
SMALL: Final = {
    "ring of 64 tokens": Workload(Shape(1, 64, 4, 2, 16), rings=(1, 2), parts=("forward+backward",)),
    "decode": Workload(Shape(2, 64, 4, 2, 16), parts=("decode",)),
}
"""For the smoke run, which proves that a suite works and measures nothing."""
SUITES: Final = {
    "cpu": ON_A_CPU,
    "gpu": ON_A_GPU | CASES,
    "gpus": ON_RINGS,
    "tpu": ON_A_GPU | ON_RINGS,
}
