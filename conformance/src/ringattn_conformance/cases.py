# SPDX-License-Identifier: Apache-2.0
"""The calls that the suite makes, as `cases.json` lists them: their options, their arrays and the right answers."""

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from ringattn_core.backends import discovery
from ringattn_core.contract.features import Feature

from . import case_inputs, chosen_keys, oracle
from .case_inputs import Builder
from .oracle import Answer, Problem, attend

DTYPES: Final = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
OPERANDS: Final = {
    "q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "bias": "dbias", "slopes": "dslopes",
}  # fmt: skip
"""The differentiable inputs and the names of their gradients."""
OF_GRADIENTS: Final = {gradient: name for name, gradient in OPERANDS.items()}
KEYWORDS: Final = {
    "q": "query", "k": "key", "v": "value", "sinks": "softmax_aux", "bias": "bias", "slopes": "alibi_slopes",
    "q_segments": "q_segment_ids", "kv_segments": "kv_segment_ids", "q_positions": "q_positions",
    "kv_positions": "kv_positions", "mask": "attention_mask", "selected": "selected", "seed": "dropout_seed",
}  # fmt: skip
"""The arrays of a call, and their names in `ring_attention`. It also has `first` and `last`, the two of `kv_range`."""
FEATURES: Final = {
    "causal": Feature.CAUSAL, "window": Feature.SLIDING_WINDOW, "chunk": Feature.CHUNKED,
    "segments": Feature.SEGMENT_IDS, "positions": Feature.POSITIONS, "builder": Feature.MASK_BUILDER,
    "dense_mask": Feature.ATTENTION_MASK, "ranges": Feature.KEY_RANGE, "selected": Feature.SELECTED,
    "soft_cap": Feature.SOFT_CAP, "sinks": Feature.SINKS, "bias": Feature.BIAS, "slopes": Feature.ALIBI,
    "dropout": Feature.DROPOUT, "lse": Feature.RETURN_LSE, "max_logits": Feature.MAX_LOGITS,
    "fused_backward": Feature.FUSED_BACKWARD, "precision": Feature.PRECISION,
}  # fmt: skip
"""The options of a case and the features that they need."""
LARGEST_VALUES: Final = {"float32": 2.75, "float16": 2.0, "bfloat16": 2.75}
"""`v` is clipped to this magnitude, then multiplied by `value_gain`, and scaled down by what dropout keeps: always in
float16, in other dtypes if it keeps less than 0.7. So without a gain no output reaches 4, in float16 none 2. Beyond,
rounding the exact result alone is most of the tolerance, and kernels may round weights, too."""
KEPT: Final = {"float32": 0.7, "float16": 1.0, "bfloat16": 0.7}
"""Values are scaled down if dropout keeps less than this."""

DROPOUT_SEEDS: Final = (0x9E3779B1, 0, 2**31, 2**32 - 1)
"""Seeds for dropout: the seed of a case chooses one of them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The options of a call. Its arrays hold the same numbers for every ring size, layout and backend.

    Lengths are those of whole sequences. `segments`, `positions`, `ranges` and `builder` are names in `case_inputs`,
    `selected` is one in `chosen_keys`, and `groups` are "1", "K" or "N".
    `bias` and `dense_mask` name the axes among "BNT" that have full size: the other axes have size 1, but S is always
    full. The bias has the dtype of the queries, or `bias_dtype`. `sinks` is `shared` (`[N + 1]`, every head has all),
    `head` (`[N]`), `each` (`[N, 2]`) or `closed` (as `each`, but -inf in the first head). `gain` multiplies the
    queries, `value_gain` the values, `cotangent_gain` the cotangent of the output, and `slopes` ALiBi's slopes of about
    a quarter (0: no ALiBi). `bias_offset` is added to the bias. With `bias_fixed` the bias is not differentiated, and
    with `forward` no input is. In float32 only about `nonzero` components of each query are not zero, scaled up so
    that scores are as large as with all components. `seed` seeds all random numbers.
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
    segments: str | None = None
    positions: str | None = None
    ranges: str | None = None
    selected: str | None = None
    selected_size: int = 1
    groups: str = "1"
    builder: str | None = None
    dense_mask: str | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    bias_forbids: bool = False
    bias_offset: float = 0.0
    bias_fixed: bool = False
    slopes: float = 0.0
    sinks: str | None = None
    dropout: float = 0.0
    lse: bool = False
    max_logits: bool = False
    fused_backward: bool = False
    precision: str | None = None
    block_size: int | None = None
    forward: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def fits(self, ring: int, layout: str) -> bool:
        """Whether both sequences divide over the ring in this layout."""
        parts = ring * (2 if layout == "zigzag" else 1)
        size = self.selected_size if self.selected else 1
        whole = ring == 1 or size == 1 or (layout != "striped" and self.kv_length % (parts * size) == 0)
        return whole and all(length % parts == 0 for length in (self.q_length, self.kv_length))

    @functools.cached_property
    def changes(self) -> dict[str, Any]:
        """The options that differ from the defaults."""
        own = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {field.name: x for field, x in own if field.name not in ("name", "seed") and x != field.default}

    def with_heads_for(self, backend: str) -> "Case":
        """The case with head sizes rounded up to those that the backend's `head_multiple` divides.

        Sizes that differ still differ.
        """
        multiple = discovery.get(backend).descriptor().head_multiple
        q, v = (-(-size // multiple) * multiple for size in (self.head_dim, self.value_dim))
        if q == v and self.head_dim != self.value_dim:
            v += multiple
        return self if (q, v) == (self.head_dim, self.value_dim) else dataclasses.replace(self, head_dim=q, value_dim=v)

    def too_wide_for(self, backend: str) -> bool:
        """Whether heads are larger than the backend's `largest_head`."""
        return discovery.get(backend).descriptor().misfit(max(self.head_dim, self.value_dim)) is not None

    @property
    def masks_of_heads(self) -> Builder | None:
        return None if self.builder is None else case_inputs.BUILDERS[self.builder]

    @functools.cached_property
    def needs(self) -> frozenset[Feature]:
        """The features that the call needs."""
        given = {feature for name, feature in FEATURES.items() if name in self.changes}
        sizes = {
            Feature.GROUPED_HEADS: self.kv_heads != self.heads,
            Feature.UNEQUAL_VALUE_DIM: self.value_dim != self.head_dim,
            Feature.CROSS_LENGTHS: self.q_length != self.kv_length,
        }
        return frozenset([Feature[self.dtype.upper()], *given, *(feature for feature, need in sizes.items() if need)])

    def within(self, features: Collection[Feature]) -> "Case":
        """The case with options that need features outside `features` at their defaults. The dtype always stays."""
        if self.needs <= set(features):
            return self
        kept = ("name", "dtype", "seed", "batch", "q_length", "heads", "head_dim")
        plain = {field.name: field.default for field in dataclasses.fields(self) if field.name not in kept}
        plain |= {"kv_length": self.q_length, "kv_heads": self.heads, "value_dim": self.head_dim}
        found = self
        for name, x in plain.items():
            without = found if getattr(found, name) == x else dataclasses.replace(found, **{name: x})
            if without.needs < found.needs and not found.needs - without.needs <= set(features):
                found = without
        return found

    @functools.cached_property
    def inputs(self) -> "Inputs":
        """The arrays of the call, in natural order and rounded to the dtype; drawn with `seed`."""
        rng, seed = np.random.default_rng(self.seed), DROPOUT_SEEDS[self.seed % len(DROPOUT_SEEDS)]
        rows, columns = self.q_length, self.kv_length
        dtype = DTYPES[self.dtype]

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(dtype)

        q = self.gain * rng.standard_normal((self.batch, rows, self.heads, self.head_dim))
        if self.dtype == "float32" and self.nonzero is not None and self.nonzero < self.head_dim:
            share = self.nonzero / self.head_dim
            q = np.where(rng.random(q.shape) < share, q / np.sqrt(share), 0.0)
        q = q.astype(dtype)
        k = normal(self.batch, columns, self.kv_heads, self.head_dim)
        values = rng.standard_normal((self.batch, columns, self.kv_heads, self.value_dim))
        gain, largest = self.value_gain * min(1.0, (1.0 - self.dropout) / KEPT[self.dtype]), LARGEST_VALUES[self.dtype]
        v = (gain * np.clip(values, -largest, largest)).astype(dtype)
        sizes = (self.batch, rows, columns)
        q_ids, kv_ids = case_inputs.SEGMENTS[self.segments](*sizes) if self.segments else (None, None)
        q_positions, kv_positions = case_inputs.POSITIONS[self.positions](*sizes) if self.positions else (None, None)
        bias = None
        if self.bias is not None:
            shape = (*self._broadcast(self.bias, rows), columns)
            bias = (self.bias_offset + rng.standard_normal(shape)).astype(DTYPES[self.bias_dtype or self.dtype])
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
        if self.ranges:
            drawn = case_inputs.RANGES[self.ranges](*oracle.positions(problem), self.batch, self.heads)
            problem = dataclasses.replace(problem, kv_range=drawn)
        if self.selected:
            groups = {"1": 1, "K": self.kv_heads, "N": self.heads}[self.groups]
            drawn = chosen_keys.SELECTED[self.selected](problem, groups, self.selected_size)
            problem = dataclasses.replace(problem, selected=drawn, selected_size=self.selected_size)
        seen = dense
        if (builder := self.masks_of_heads) is not None:
            built = builder.dense(problem)
            seen = built if dense is None else built & dense
        dlse = rng.standard_normal((self.batch, self.heads, rows)).astype(np.float32) if self.lse else None
        dout = (self.cotangent_gain * normal(self.batch, rows, self.heads, self.value_dim)).astype(dtype)
        return Inputs(dataclasses.replace(problem, seen=seen), dense, dout, dlse)

    @functools.cached_property
    def answer(self) -> Answer:
        """The oracle's answer; without gradients if the case has `forward`."""
        return attend(self.inputs.problem, None if self.forward else self.inputs.dout, self.inputs.dlse)

    def _broadcast(self, full: str, rows: int) -> tuple[int, int, int]:
        b, n, t = (size if axis in full else 1 for axis, size in (("B", self.batch), ("N", self.heads), ("T", rows)))
        return b, n, t

    def _slopes(self, rng: np.random.Generator) -> np.ndarray | None:
        """ALiBi's slope for each head. The last is negative (favours far keys), but too small to hide near keys."""
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
    """A problem for the oracle, the dense mask that is passed to the call, and the cotangents of `out` and `lse`."""

    problem: Problem
    dense_mask: np.ndarray | None
    dout: np.ndarray
    dlse: np.ndarray | None

    @property
    def fixed(self) -> dict[str, Any]:
        """The arrays of the call that are not differentiable."""
        seed = np.uint32(self.problem.seed) if self.problem.dropout else None
        first, last = self.problem.kv_range or (None, None)
        given = {"mask": self.dense_mask, "seed": seed, "first": first, "last": last, "selected": self.problem.selected}
        given |= {name: getattr(self.problem, name) for name in KEYWORDS if name.endswith(("_segments", "_positions"))}
        return {name: x for name, x in given.items() if x is not None}


def keywords(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a call as keyword arguments of `ring_attention`."""
    found = {KEYWORDS[name]: x for name, x in arrays.items() if name in KEYWORDS}
    return found | ({"kv_range": (arrays["first"], arrays["last"])} if "first" in arrays else {})


def load(name: str) -> Any:
    """Reads a JSON file of this package; lists become tuples."""

    def frozen(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: frozen(value) for key, value in x.items()}
        return tuple(map(frozen, x)) if isinstance(x, list) else x

    return frozen(json.loads(Path(__file__).with_name(name).read_text()))


_CHOSEN: Final = load("chosen_keys.json")
ENTRIES: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    kind: (*entries, *_CHOSEN.get(kind, ())) for kind, entries in load("cases.json").items()
}
"""`named` has every option alone, edge cases and combinations; `elsewhere` has cases that single tests ask for;
`design` has calls with many options at once, in which all levels of `factors.json` meet, and as "kept" some older ones,
in which three levels meet that a kernel once was wrong for; `values` has calls drawn from `domains.json`; `cache` has
calls of decoding and prefill. `chosen_keys.json` adds to `named`. An entry has fields of `Case` and of
`lattice.Point`; `why` is for readers.
"""


def of_entry(entry: Mapping[str, Any]) -> Case:
    """The case of an entry of `cases.json`."""
    return Case(**{field.name: entry[field.name] for field in dataclasses.fields(Case) if field.name in entry})


CASES: Final = tuple(map(of_entry, ENTRIES["named"]))
NAMED: Final = {case.name: case for case in (*CASES, *map(of_entry, ENTRIES["elsewhere"]))}
