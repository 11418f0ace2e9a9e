# SPDX-License-Identifier: Apache-2.0
"""How far a query may see by positions alone: causality, a window and chunks, known when a program is traced."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
UNBOUNDED: Final = 2**30
"""The `span` of a reach with a side that has no bound."""


class Interval(NamedTuple):
    """The first and the last key position that each query sees, both inclusive; `None` is no bound on that side.

    A query with `first > last` sees no key. `a & b` is the intersection.
    """

    first: Int32[Array, "*tokens"] | None = None
    last: Int32[Array, "*tokens"] | None = None

    def __and__(self, other: "Interval") -> "Interval":
        return Interval(_joined(jnp.maximum, self.first, other.first), _joined(jnp.minimum, self.last, other.last))

    def hull(self, other: "Interval") -> "Interval":
        """The least interval that contains both; neither is empty."""
        return Interval(
            None if self.first is None or other.first is None else jnp.minimum(self.first, other.first),
            None if self.last is None or other.last is None else jnp.maximum(self.last, other.last),
        )


def _joined(combine: Callable[..., Array], a: Array | None, b: Array | None) -> Array | None:
    """`combine(a, b)`, or the one that is given."""
    return b if a is None else a if b is None else combine(a, b)


@dataclasses.dataclass(frozen=True)
class Reach:
    """A set of (query, key) pairs of positions. With every field at its default, each query sees every key.

    `a & b` contains the intersection of two sets, and `a | b` their union, so a plan that keeps what a reach allows
    loses no pair. `a & b` is the intersection itself, unless the sizes of chunks differ.

    Args:
        causal: A query sees no key at a later position.
        left: A query sees at most this many positions before it; `None` is unbounded. `(left, right)` is the
            `sliding_window` of a call, or its `max_distance`.
        right: A query sees at most this many positions after it; `None` is unbounded. Negative: only keys at least so
            far before it.
        chunk: A query sees the keys of its own chunk of this many positions, none after itself; at most 2^30.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None

    def bounds(self, positions: Any) -> Interval:
        """The interval that queries at `positions` see. Neither end decreases as a position grows.

        `positions` and the results are int32, of NumPy or JAX; a sum beyond int32 is clipped.
        """
        first = None if self.left is None else moved(positions, -self.left)
        last = None if self.right is None else moved(positions, self.right)
        if (self.causal or self.chunk is not None) and (self.right is None or self.right >= 0):
            last = positions
        if self.chunk is not None:
            start = positions - positions % self.chunk
            first = start if first is None else start.clip(min=first)
        return Interval(first, last)

    @property
    def span(self) -> int:
        """The largest number of keys that any query sees; `UNBOUNDED` if a side has no bound."""
        first, last = self.bounds(np.int32(0 if self.chunk is None else self.chunk - 1))
        return UNBOUNDED if first is None or last is None else min(max(int(last) - int(first) + 1, 0), UNBOUNDED)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """How far any query sees to the left and to the right, chunks and causality counted; `None` is unbounded."""
        chunk = [] if self.chunk is None else [self.chunk - 1]
        after = [0] if self.causal or self.chunk is not None else []
        return _least(self.left, *chunk), _least(self.right, *after)

    def __and__(self, other: "Reach") -> "Reach":
        pairs = ((self.left, other.left), (self.right, other.right), (self.chunk, other.chunk))
        return Reach(self.causal or other.causal, *(_least(*pair) for pair in pairs))

    def __or__(self, other: "Reach") -> "Reach":
        if self == other:
            return self
        left, right = (
            None if mine is None or theirs is None else max(mine, theirs)
            for mine, theirs in zip(self.sides, other.sides, strict=True)
        )
        return Reach(self.causal and other.causal, left, right, self.chunk if self.chunk == other.chunk else None)


def moved(positions: Any, by: int) -> Any:
    """`positions + by`, clipped to int32 before the sum can exceed it."""
    within = positions.clip(max=INT32_MAX - by) if by >= 0 else positions.clip(min=INT32_MIN - by)
    return within + by


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
