# SPDX-License-Identifier: Apache-2.0
"""The calls that the suite makes: every option alone, edge cases and combinations, each with a name."""

import dataclasses
import functools
import zlib
from collections.abc import Collection
from typing import Any, Final

import ml_dtypes
import numpy as np
from ringattn_core.contract.features import Feature

from . import case_inputs
from .case_inputs import Builder, Ids, Positions
from .oracle import Answer, Problem, attend

DTYPES: Final = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
OPERANDS: Final = {
    "q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "bias": "dbias", "slopes": "dslopes",
}  # fmt: skip
"""The differentiable inputs and the names of their gradients."""
KEYWORDS: Final = {
    "q": "query", "k": "key", "v": "value", "sinks": "softmax_aux", "bias": "bias", "slopes": "alibi_slopes",
    "q_segments": "q_segment_ids", "kv_segments": "kv_segment_ids", "q_positions": "q_positions",
    "kv_positions": "kv_positions", "mask": "attention_mask", "seed": "dropout_seed",
}  # fmt: skip
"""The arrays of a call, and their names in `ring_attention`."""
LARGEST_VALUE: Final = 2.75
"""Values are clipped to this, before `value_gain`. So without a gain no output reaches 4, also where dropout divides by
0.7. From 4 on the rounding of the exact result to float16 alone is 0.98 of the tolerance; below, it is at most half."""

DROPOUT_SEEDS: Final = (0x9E3779B1, 0, 2**31, 2**32 - 1)
"""Seeds for dropout. Each case takes one of them, by a hash of its name."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The options of a call. Its numbers are the same for every ring size, layout and backend.

    Lengths are global. `bias` and `dense_mask` name the axes that are full ("BNTS"); the others are 1, columns
    excepted. The bias has the dtype of the queries, or `bias_dtype`. `sinks` is `shared`, `head`, `each` (`[N, 2]`) or
    `closed`: as `each`, and the first head's are -inf. `gain` multiplies the queries, `value_gain` the values,
    `cotangent_gain` the cotangent of the output, and `slopes` ALiBi's slopes of about a quarter (0: no ALiBi). About
    `nonzero` components of each query are not zero, and larger, so that scores are as large as with all components.
    `core` puts the case in the core tier. `ring` is its ring there and in the full tier, if it needs a certain one.
    """

    name: str
    batch: int = 2
    q_length: int = 48
    kv_length: int = 48
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    gain: float = 1.0
    nonzero: int | None = None
    value_gain: float = 1.0
    cotangent_gain: float = 1.0
    causal: bool = False
    window: Any = None
    chunk: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    segments: Ids | None = None
    positions: Positions | None = None
    builder: Builder | None = None
    dense_mask: str | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    bias_forbids: bool = False
    slopes: float = 0.0
    sinks: str | None = None
    dropout: float = 0.0
    lse: bool = False
    fused_backward: bool = False
    precision: str | None = None
    block_size: int | None = None
    core: bool = False
    ring: int | None = None

    def __str__(self) -> str:
        return self.name

    def fits(self, ring: int, layout: str) -> bool:
        """Whether both sequences divide over the ring in this layout."""
        parts = ring * (2 if layout == "zigzag" else 1)
        return all(length % parts == 0 for length in (self.q_length, self.kv_length))

    @property
    def number(self) -> int:
        """A number of the name: it decides what is drawn for the case, and its place in the full tier."""
        return zlib.crc32(self.name.encode())

    @property
    def needs(self) -> frozenset[Feature]:
        """The features that the call needs."""
        wanted = {
            Feature[self.dtype.upper()]: True,
            Feature.CAUSAL: self.causal,
            Feature.SLIDING_WINDOW: self.window is not None,
            Feature.CHUNKED: self.chunk is not None,
            Feature.SEGMENT_IDS: self.segments is not None,
            Feature.POSITIONS: self.positions is not None,
            Feature.MASK_BUILDER: self.builder is not None,
            Feature.ATTENTION_MASK: self.dense_mask is not None,
            Feature.GROUPED_HEADS: self.kv_heads != self.heads,
            Feature.UNEQUAL_VALUE_DIM: self.value_dim != self.head_dim,
            Feature.CROSS_LENGTHS: self.q_length != self.kv_length,
            Feature.SOFT_CAP: self.soft_cap is not None,
            Feature.SINKS: self.sinks is not None,
            Feature.BIAS: self.bias is not None,
            Feature.ALIBI: self.slopes > 0,
            Feature.DROPOUT: self.dropout > 0,
            Feature.RETURN_LSE: self.lse,
            Feature.FUSED_BACKWARD: self.fused_backward,
            Feature.PRECISION: self.precision is not None,
        }
        return frozenset(feature for feature, needed in wanted.items() if needed)

    def within(self, features: Collection[Feature]) -> "Case":
        """The case without the options that need other features. Its dtype stays."""
        found = self
        for field in dataclasses.fields(self):
            if field.name in ("name", "dtype"):
                continue
            without = dataclasses.replace(found, **{field.name: field.default})
            if without.needs < found.needs and not found.needs - without.needs <= set(features):
                found = without
        return found

    @functools.cached_property
    def inputs(self) -> "Inputs":
        """The arrays of the call, in natural order and rounded to the dtype; drawn by a seed from the name."""
        rng, seed = np.random.default_rng(self.number), DROPOUT_SEEDS[self.number % len(DROPOUT_SEEDS)]
        rows, columns = self.q_length, self.kv_length
        dtype = DTYPES[self.dtype]

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(dtype)

        q = self.gain * rng.standard_normal((self.batch, rows, self.heads, self.head_dim))
        if self.nonzero is not None and self.nonzero < self.head_dim:
            share = self.nonzero / self.head_dim
            q = np.where(rng.random(q.shape) < share, q / np.sqrt(share), 0.0)
        q = q.astype(dtype)
        k = normal(self.batch, columns, self.kv_heads, self.head_dim)
        values = rng.standard_normal((self.batch, columns, self.kv_heads, self.value_dim))
        v = (self.value_gain * np.clip(values, -LARGEST_VALUE, LARGEST_VALUE)).astype(dtype)
        q_ids, kv_ids = self.segments(self.batch, rows, columns) if self.segments else (None, None)
        q_positions, kv_positions = self.positions(self.batch, rows, columns) if self.positions else (None, None)
        bias = None
        if self.bias is not None:
            shape = (*self._broadcast(self.bias, rows), columns)
            bias = rng.standard_normal(shape).astype(DTYPES[self.bias_dtype or self.dtype])
            if self.bias_forbids:
                bias[rng.random(bias.shape) < 0.25] = -np.inf
        dense = None
        if self.dense_mask is not None:
            dense = rng.random((*self._broadcast(self.dense_mask, rows), columns)) < 0.6
        problem = Problem(
            q, k, v, self.causal, self.window, self.chunk, q_ids, kv_ids, q_positions, kv_positions,
            soft_cap=self.soft_cap, scale=self.scale, bias=bias, dropout=self.dropout, seed=seed,
            slopes=self._slopes(rng),
            sinks=self._sinks(rng),
        )  # fmt: skip
        seen = dense
        if self.builder is not None:
            built = self.builder.dense(problem)
            seen = built if dense is None else built & dense
        dlse = rng.standard_normal((self.batch, self.heads, rows)).astype(np.float32) if self.lse else None
        dout = (self.cotangent_gain * normal(self.batch, rows, self.heads, self.value_dim)).astype(dtype)
        return Inputs(dataclasses.replace(problem, seen=seen), dense, dout, dlse)

    @functools.cached_property
    def answer(self) -> Answer:
        """The oracle's answer."""
        return attend(self.inputs.problem, self.inputs.dout, self.inputs.dlse)

    def _broadcast(self, full: str, rows: int) -> tuple[int, int, int]:
        b, n, t = (size if axis in full else 1 for axis, size in (("B", self.batch), ("N", self.heads), ("T", rows)))
        return b, n, t

    def _slopes(self, rng: np.random.Generator) -> np.ndarray | None:
        """A slope for each head. The last is negative, and so small that far keys do not outweigh all others."""
        if not self.slopes:
            return None
        slopes = np.abs(rng.standard_normal(self.heads)).astype(np.float32) / 4 * np.float32(self.slopes)
        slopes[-1] /= -8
        return slopes

    def _sinks(self, rng: np.random.Generator) -> np.ndarray | None:
        if self.sinks is None:
            return None
        shape = {"shared": (self.heads + 1,), "head": (self.heads,)}.get(self.sinks, (self.heads, 2))
        sinks = rng.standard_normal(shape).astype(np.float32)
        if self.sinks == "closed":
            sinks[0] = -np.inf
        return sinks


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A problem for the oracle, the dense mask that the call gets, and the cotangents."""

    problem: Problem
    dense_mask: np.ndarray | None
    dout: np.ndarray
    dlse: np.ndarray | None

    @property
    def fixed(self) -> dict[str, Any]:
        """The arrays of the call that are not differentiable."""
        seed = np.uint32(self.problem.seed) if self.problem.dropout else None
        given = {"mask": self.dense_mask, "seed": seed}
        given |= {name: getattr(self.problem, name) for name in KEYWORDS if name.endswith(("_segments", "_positions"))}
        return {name: x for name, x in given.items() if x is not None}


_CROSS: Final[dict[str, Any]] = {"q_length": 48, "kv_length": 96}
_GROUPED: Final[dict[str, Any]] = {"heads": 4, "kv_heads": 2}

ALONE: Final = (
    Case("plain"),
    Case("lse", lse=True),
    Case("causal", causal=True, core=True),
    Case("window", window=7, core=True),
    Case("window-self", window=(0, 0)),
    Case("window-huge", window=2**31 - 1),
    Case("chunk", chunk=16),
    Case("chunk-larger-than-shard", chunk=29),
    Case("segments", segments=case_inputs.packed, core=True),
    Case("segments-padding", lse=True, core=True, segments=case_inputs.padding),
    Case("segments-unseen-queries", lse=True, core=True, segments=case_inputs.unseen_ranks),
    Case("segments-cross", segments=case_inputs.crossed, **_CROSS),
    Case("positions-restart", positions=case_inputs.restarting, segments=case_inputs.packed, causal=True),
    Case("positions-extreme", positions=case_inputs.extreme, window=(11, 3)),
    Case("positions-nothing-visible", lse=True, positions=case_inputs.later_keys, causal=True),
    Case("mask-algebra", builder=case_inputs.ALGEBRA),
    Case("mask-predicate", builder=case_inputs.PREDICATE, positions=case_inputs.restarting),
    Case("dense-mask", dense_mask="T"),
    Case("gqa", core=True, **_GROUPED),
    Case("value-dim", value_dim=5, dtype="float16"),
    Case("cross", **_CROSS),
    Case("cross-more-queries", dtype="float16", q_length=96, causal=True, chunk=29, window=(9, 0)),
    Case("soft-cap", core=True, soft_cap=1.5),
    Case("scale-zero", scale=0.0, core=True),
    # Without a mask, nothing but the kernel itself keeps out what lies beyond the last key in its tile.
    Case("sinks", sinks="head", core=True, dtype="bfloat16"),
    Case("sinks-each", lse=True, sinks="each", **_GROUPED),
    Case("sinks-closed-empty-rows", lse=True, sinks="closed", segments=case_inputs.unseen_ranks),
    Case("bias", bias="BNT", core=True),
    Case("bias-rows", bias="T", causal=True),
    Case("bias-heads", bias="N"),
    Case("alibi", slopes=1),
    Case("alibi-long-distances", slopes=2.0**-8, positions=case_inputs.spread, core=True),
    Case("dropout", dropout=0.3),
    # No other call in bfloat16 shows whether a kernel that caps scores is still causal.
    Case(
        "fused-backward", fused_backward=True, causal=True, dtype="bfloat16", head_dim=192, value_dim=192, soft_cap=1.5
    ),
    Case("precision", precision="default", core=True),
)

COMBINED: Final = (
    Case("odd-lengths", q_length=10, kv_length=10, causal=True, head_dim=5, value_dim=3),
    Case("odd-lengths-cross", q_length=9, kv_length=3, causal=True),
    Case("length-one", q_length=8, kv_length=8, causal=True, dtype="bfloat16", ring=8),
    Case("length-one-everything", dtype="float16", q_length=8, kv_length=8, ring=8, causal=True, bias="NT",
         sinks="head", dropout=0.3, slopes=1, soft_cap=3.0),
    Case("one-query", q_length=4, kv_length=36, window=(3, 4), ring=4, **_GROUPED),
    Case("batch-one", batch=1, heads=1, kv_heads=1, causal=True, head_dim=1, value_dim=1),
    # The gradients of the scores exceed float16 unless they are multiplied by the scale first.
    Case("float16-derivatives", dtype="float16", head_dim=192, value_dim=192, window=(1, 0), scale=2.0**-10,
         cotangent_gain=8192.0, core=True),
    # The sum of the weighted values exceeds float16 unless it is divided by the sum of the weights first.
    Case("float16-values", dtype="float16", value_gain=8192.0, cotangent_gain=2.0**-6, q_length=256, kv_length=256,
         core=True, ring=2),
    Case("logits-1e4", lse=True, gain=1e4, causal=True),
    Case("everything", lse=True, causal=True, window=(29, None), segments=case_inputs.packed,
         positions=case_inputs.restarting, builder=case_inputs.OF_HEADS, dense_mask="BNT", soft_cap=3.0, scale=0.5,
         bias="BNT", bias_forbids=True, slopes=1, sinks="each", dropout=0.2, heads=4, kv_heads=2, value_dim=6),
)  # fmt: skip

HALF: Final = tuple(
    dataclasses.replace(case, name=f"{case.name}-{dtype}", dtype=dtype)
    for dtype in ("bfloat16", "float16")
    for case in (
        Case("causal", causal=True, **_GROUPED),
        # Not one key: its exact gradients are zero, and `delta` from an output in half precision is off by rounding.
        Case("dropout-of-few-keys", window=(3, 0), dropout=0.3, bias="NT", value_dim=6),
        Case("long-distances", slopes=2.0**-8, positions=case_inputs.spread),
        Case("one-query", segments=case_inputs.unseen_ranks, q_length=2, kv_length=18, lse=True, heads=8,
             kv_heads=2, core=dtype == "bfloat16"),
    )
)  # fmt: skip

LONG: Final = (
    Case("long-window", q_length=768, kv_length=768, head_dim=16, value_dim=16, causal=True, window=(100, 20),
         positions=case_inputs.later_rows),
    Case("long-causal", batch=1, q_length=768, kv_length=768, head_dim=16, value_dim=16, causal=True, **_GROUPED),
    # In `long-segments` and `long-half` the keys fill whole tiles of 128. In the first a rank has more than 512 keys.
    Case("long-segments", q_length=256, kv_length=1536, segments=case_inputs.crossed, sinks="head", dropout=0.1,
         ring=2),
    Case("long-half", dtype="bfloat16", batch=1, q_length=256, kv_length=2048, head_dim=128, value_dim=128,
         segments=case_inputs.crossed, ring=4, **_GROUPED),
    Case("blocks", block_size=16, dtype="bfloat16", batch=3, q_length=192, kv_length=192, causal=True,
         window=(70, None), positions=case_inputs.far_rows, bias="NT"),
    Case("long-half-bias", dtype="float16", q_length=512, kv_length=512, head_dim=128, value_dim=128,
         positions=case_inputs.far_rows, causal=True, bias="NT", bias_forbids=True, ring=2),
    Case("blocks-everything", block_size=16, q_length=96, kv_length=192, ring=2, chunk=50, segments=case_inputs.crossed,
         sinks="each", dropout=0.2, slopes=1, soft_cap=3.0, builder=case_inputs.ALGEBRA, dense_mask="BNT",
         bias="B", bias_forbids=True, value_dim=6, **_GROUPED),
)  # fmt: skip

CASES: Final[tuple[Case, ...]] = (*ALONE, *COMBINED, *HALF, *LONG)
ELSEWHERE: Final = (
    Case("transformed", lse=True, causal=True, sinks="head", bias="NT", slopes=1, **_GROUPED),
    Case("busy", causal=True, sinks="head", bias="T", slopes=1, dropout=0.2, builder=case_inputs.OF_HEADS,
         segments=case_inputs.packed, **_GROUPED),
    Case("shared", causal=True, sinks="shared", bias="", slopes=1, dropout=0.2, **_GROUPED),
    Case("split-heads", heads=8, kv_heads=4, bias="NT", slopes=1, sinks="each", dropout=0.2,
         builder=case_inputs.OF_HEADS),
    Case("garbage", lse=True, segments=case_inputs.padding_among_tokens, sinks="head", bias="NT", slopes=1,
         soft_cap=5.0),
    Case("garbage-bfloat16", lse=True, segments=case_inputs.padding_among_tokens, dtype="bfloat16", bias="NT"),
)  # fmt: skip
"""Cases of tests that look at one thing: transformations, what padding holds."""
NAMED: Final = {case.name: case for case in (*CASES, *ELSEWHERE)}
