# SPDX-License-Identifier: Apache-2.0
"""The kinds of masks: by position, by document, by a dense array, by a function."""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool
from typing_extensions import override

from ..errors import InputError
from .algebra import Coordinates, Mask, all_of
from .int32 import fitting


def _whole_number(mask: Mask, name: str, least: int) -> None:
    x = getattr(mask, name)
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or not least <= x < 2**31:
        what = f"{type(mask).__name__}({name}=...)"
        raise InputError(what, f"got {x!r}", f"It needs an integer of at least {least} and below 2^31")


def _rows(x: Any) -> Any:
    return x[..., :, None]


def _columns(x: Any) -> Any:
    return x[..., None, :]


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every pair."""

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (q.index == q.index) & (kv.index == kv.index)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        first = q.index[..., 0]
        full = _rows(first == first) & _columns(kv.index[..., 0] == kv.index[..., 0])
        return full, full


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """Keys at most `offset` positions after the query; by default none after it."""

    offset: int = 0

    def __post_init__(self) -> None:
        _whole_number(self, "offset", -(2**31))

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return kv.positions - q.positions <= self.offset

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        i, j = q.positions, kv.positions
        some = _columns(j.min(-1)) - _rows(i.max(-1)) <= self.offset
        return some, _columns(j.max(-1)) - _rows(i.min(-1)) <= self.offset


@dataclasses.dataclass(frozen=True)
class Local(Mask):
    """Keys at most `left` positions before and `right` positions after the query; `None` is unbounded.

    The right side is `Causal(right)`; the left side is `Causal(left)` with queries and keys exchanged.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                _whole_number(self, name, 0)

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        seen = [Full().visible(q, kv)]
        seen += [] if self.left is None else [Causal(self.left).visible(kv, q)]
        return all_of(seen if self.right is None else [*seen, Causal(self.right).visible(q, kv)])

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        found = [Full().tiles(q, kv)]
        if self.left is not None:
            some, full = Causal(self.left).tiles(kv, q)
            found.append((some.swapaxes(-1, -2), full.swapaxes(-1, -2)))
        if self.right is not None:
            found.append(Causal(self.right).tiles(q, kv))
        return all_of(some for some, _ in found), all_of(full for _, full in found)


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """Keys in the query's own chunk of `size` positions, and not after the query."""

    size: int

    def __post_init__(self) -> None:
        _whole_number(self, "size", 1)

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (q.positions // self.size == kv.positions // self.size) & (kv.positions <= q.positions)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        some, full = Causal().tiles(q, kv)
        same = _same_span(q.positions // self.size, kv.positions // self.size)
        return some & same[0], full & same[1]


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """Keys at the first `length` positions. `Prefix(n) | Causal()` is the mask of a prefix language model."""

    length: int

    def __post_init__(self) -> None:
        _whole_number(self, "length", 0)

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (kv.positions < self.length) & (q.positions == q.positions)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        some, full = Full().tiles(q, kv)
        return some & _columns(kv.positions.min(-1) < self.length), full & _columns(kv.positions.max(-1) < self.length)


class _Held:
    """A host array in a mask. It is hashed by content, once, so that the mask can be a static argument."""

    __slots__ = ("array", "digest")

    def __init__(self, array: np.ndarray):
        self.array = np.ascontiguousarray(array)
        self.array.flags.writeable = False
        header = f"{self.array.shape}{self.array.dtype}".encode()
        self.digest = hashlib.sha256(header + self.array.tobytes()).digest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.digest == other.digest

    def __repr__(self) -> str:
        return f"array{self.array.shape}"


def _host(what: str, x: Any) -> np.ndarray:
    if isinstance(x, jax.core.Tracer):
        raise InputError(what, "is traced", "A mask is static: pass a NumPy array, or use segment ids")
    return np.array(x)


def _document_ids(name: str, x: Any) -> np.ndarray:
    argument = f"Document({name}=...)"
    ids = _host(argument, x)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            argument,
            f"got {ids.dtype} of shape {ids.shape}",
            "It needs one integer for each token. Pass ids that differ between batch rows as q_segment_ids",
        )
    fitting(argument, ids)
    return ids.astype(np.int32, copy=False)


@dataclasses.dataclass(frozen=True, init=False)
class Document(Mask):
    """Keys of the query's own document, the same in every row of the batch.

    `q_ids` and `kv_ids` are host integers, one for each token of the whole sequence; a negative id is padding. Without
    `kv_ids`, keys have the ids of queries.
    """

    q_ids: _Held
    kv_ids: _Held

    def __init__(self, q_ids: Any, kv_ids: Any = None):
        q_held = _Held(_document_ids("q_ids", q_ids))
        object.__setattr__(self, "q_ids", q_held)
        object.__setattr__(self, "kv_ids", q_held if kv_ids is None else _Held(_document_ids("kv_ids", kv_ids)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q_ids.array.size, self.kv_ids.array.size

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        q_ids, kv_ids = self._ids(q, kv)
        return (q_ids == kv_ids) & (q_ids >= 0)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        return same_segment(*self._ids(q, kv))

    def _ids(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        return _take(self.q_ids.array, q.index), _take(self.kv_ids.array, kv.index)


@dataclasses.dataclass(frozen=True, init=False)
class Numpy(Mask):
    """A dense host `array` `[T, S]` of the whole sequence, true where visible, addressed by global index."""

    held: _Held
    bounded = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __init__(self, array: Any):
        held = _host("Numpy", array)
        if held.ndim != 2 or np.issubdtype(held.dtype, np.inexact):
            raise InputError(
                "Numpy",
                f"got {held.dtype} of shape {held.shape}",
                "It needs booleans [T, S]; pass numbers as bias=",
            )
        object.__setattr__(self, "held", _Held(held.astype(bool, copy=False)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.array.shape

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Bool[Array, "..."]:
        rows, columns = self.shape
        index = jnp.clip(q.index, 0, rows - 1), jnp.clip(kv.index, 0, columns - 1)
        return jnp.asarray(self.held.array)[index]


def same_segment(q_ids: Any, kv_ids: Any) -> tuple[Any, Any]:
    """`Mask.tiles` for "equal ids, not negative", of tiles of `q_ids` `[g, nq, tq]` and of `kv_ids` `[g, nk, tk]`."""
    some, full = _same_span(q_ids, kv_ids)
    some = some & _rows(q_ids.max(-1) >= 0) & _columns(kv_ids.max(-1) >= 0)
    return some, full & _rows(q_ids.min(-1) >= 0)


def _same_span(q: Any, kv: Any) -> tuple[Any, Any]:
    q_low, q_high, kv_low, kv_high = _rows(q.min(-1)), _rows(q.max(-1)), _columns(kv.min(-1)), _columns(kv.max(-1))
    return (kv_low <= q_high) & (kv_high >= q_low), (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)


def _take(ids: np.ndarray, index: Any) -> Any:
    if isinstance(index, np.ndarray):
        return ids[np.clip(index, 0, ids.size - 1)]
    return jnp.asarray(ids)[jnp.clip(index, 0, ids.size - 1)]


@dataclasses.dataclass(frozen=True)
class Predicate(Mask):
    """Pairs where `seen(q_positions, kv_positions)` is true. `seen` uses `jax.numpy` and broadcasts."""

    seen: Callable[[Any, Any], Any]
    bounded = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __post_init__(self) -> None:
        remedy = "It needs a function (q_positions, kv_positions) -> booleans"
        if not callable(self.seen):
            raise InputError("Predicate", f"got {self.seen!r}", remedy)
        try:
            signature = inspect.signature(self.seen)
        except ValueError:  # a function of C may have none
            return
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise InputError("Predicate", f"got a function of {signature}", remedy) from error

    def __repr__(self) -> str:
        return f"Predicate({getattr(self.seen, '__name__', type(self.seen).__name__)})"

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        returned, remedy = self._called(q.positions, kv.positions), "It needs booleans, true where a query sees a key"
        try:
            seen = jnp.asarray(returned)
        except (TypeError, ValueError) as error:
            raise InputError(repr(self), f"returned {type(returned).__name__}", remedy) from error
        if seen.dtype != jnp.bool_:
            raise InputError(repr(self), f"returned {seen.dtype}", remedy)
        pairs = jnp.broadcast_shapes(q.positions.shape, kv.positions.shape)
        try:
            return jnp.broadcast_to(seen, jnp.broadcast_shapes(seen.shape, pairs))
        except ValueError as error:
            raise InputError(
                repr(self), f"returned shape {seen.shape}", f"It must broadcast with the shape of the pairs, {pairs}"
            ) from error

    def _called(self, q: Any, kv: Any) -> Any:
        try:
            return self.seen(q, kv)
        except jax.errors.TracerArrayConversionError as error:
            raise InputError(
                repr(self), "gives its traced arguments to a NumPy function", "Use functions of jax.numpy in it"
            ) from error
        except (jax.errors.TracerBoolConversionError, ValueError) as error:
            if isinstance(error, ValueError) and "truth value of an array" not in str(error):
                raise
            raise InputError(
                repr(self),
                "takes the truth value of an array, as `if`, `and`, `or`, `not` and `a < b < c` do",
                "Use `&`, `|`, `~` and functions of jax.numpy in it",
            ) from error
