# SPDX-License-Identifier: Apache-2.0
"""The inputs of the GPU benchmarks, and the cases in which other kernels can be compared with ours."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp

WORK: Final = {"forward": 1.0, "forward+backward": 3.5}


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str = "bfloat16"

    def arrays(self) -> tuple[jax.Array, ...]:
        """Query, key, value, and the cotangent of the output."""
        seeds = jax.random.split(jax.random.key(0), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(
            jax.random.normal(seed, (self.batch, self.tokens, count, self.head_size)).astype(self.dtype)
            for seed, count in zip(seeds, heads, strict=True)
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
class Case:
    """A shape and what its queries see; `share` of all pairs are visible."""

    shape: Shape
    share: float = 0.5
    causal: bool = True
    window: tuple[int, int] | None = None
    document: int = 0
    """The length of a document; 0 without documents."""
    sinks: bool = False

    def ids(self) -> jax.Array | None:
        """The document of each token."""
        tokens = jnp.arange(self.shape.tokens, dtype=jnp.int32) // max(self.document, 1)
        return jnp.broadcast_to(tokens, (self.shape.batch, self.shape.tokens)) if self.document else None

    def extras(self) -> tuple[jax.Array, ...]:
        """The arrays of a call after query, key and value: sinks."""
        return (jnp.linspace(-1.0, 1.0, self.shape.heads),) if self.sinks else ()

    def options(self) -> dict[str, Any]:
        """The mask as options of `ring_attention`."""
        options: dict[str, Any] = {"causal": self.causal, "sliding_window": self.window}
        return options | {"q_segment_ids": self.ids(), "kv_segment_ids": self.ids()}


CASES: Final = {
    "causal": Case(MAIN),
    "full": Case(MAIN, share=1.0, causal=False),
    "grouped": Case(GROUPED),
    "grouped short": Case(Shape(8, 4096, 32, 8, 128)),
    "d64": Case(NARROW),
    "d96": Case(Shape(1, 16384, 16, 16, 96)),
    "d256": Case(Shape(2, 8192, 8, 8, 256)),
    "short": Case(Shape(8, 2048, 16, 16, 128)),
    "window": Case(LONG, share=4097 / LONG.tokens, causal=False, window=(4096, 0)),
    "documents": Case(PACKED, share=1024 / PACKED.tokens, document=2048),
    "ragged": Case(dataclasses.replace(MAIN, tokens=16037)),
    "sinks": Case(MAIN, sinks=True),
}
