# SPDX-License-Identifier: Apache-2.0
"""The kinds of masks: from positions, document ids, a dense array, or a function."""

import dataclasses
import functools
import hashlib
import inspect
import operator
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool
from typing_extensions import override

from ..errors import InputError
from ..integers import fitting, whole
from .algebra import Coordinates, Mask


def _refuse_no_integer(mask: Mask, name: str, least: int) -> None:
    remedy = f"It needs an integer of at least {least} and below 2^31"
    whole(f"{type(mask).__name__}({name}=...)", getattr(mask, name), least, remedy=remedy)


def _ends(x: Any) -> tuple[Any, Any]:
    """The minimum and the maximum over the last axis, the tokens of a tile."""
    return x.min(-1), x.max(-1)


class _Band(Mask):
    """A query sees the keys whose position minus its own lies in the `band` `(low, high)`; `None` is no bound.

    In a tile it lies between the first key minus the last query, and the last key minus the first query.
    """

    @property
    def band(self) -> tuple[int | None, int | None]:
        return None, None

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        distance = kv.positions - q.positions
        return self._in_band(distance, distance)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        (q_first, q_last), (kv_first, kv_last) = _ends(q.positions), _ends(kv.positions)
        least = kv_first[..., None, :] - q_last[..., :, None]
        most = kv_last[..., None, :] - q_first[..., :, None]
        return self._in_band(most, least), self._in_band(least, most)

    def _in_band(self, x: Any, y: Any) -> Any:
        """Whether `x` is not below the band, and `y` not above it."""
        low, high = self.band
        sides = ([] if low is None else [x >= low]) + ([] if high is None else [y <= high])
        return functools.reduce(operator.and_, sides or [x == x])


@dataclasses.dataclass(frozen=True)
class Full(_Band):
    """The mask in which every query sees every key."""


@dataclasses.dataclass(frozen=True)
class Causal(_Band):
    """A query sees keys at most `offset` positions after it; by default none after it."""

    offset: int = 0

    def __post_init__(self) -> None:
        _refuse_no_integer(self, "offset", -(2**31))

    @property
    @override
    def band(self) -> tuple[int | None, int | None]:
        return None, self.offset


@dataclasses.dataclass(frozen=True)
class Local(_Band):
    """A query sees keys at most `left` positions before and `right` positions after it; `None` is unbounded."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                _refuse_no_integer(self, name, 0)

    @property
    @override
    def band(self) -> tuple[int | None, int | None]:
        return None if self.left is None else -self.left, self.right


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """Every query sees the keys at positions below `length`. A prefix language model has `Prefix(n) | Causal()`."""

    length: int

    def __post_init__(self) -> None:
        _refuse_no_integer(self, "length", 0)

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (kv.positions < self.length) & (q.positions == q.positions)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        every = q.positions[..., :1] == q.positions[..., :1]
        some, full = (end[..., None, :] < self.length for end in _ends(kv.positions))
        return some & every, full & every


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """A query sees keys in its own chunk of `size` positions that are not after it."""

    size: int

    def __post_init__(self) -> None:
        _refuse_no_integer(self, "size", 1)

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (q.positions // self.size == kv.positions // self.size) & (kv.positions <= q.positions)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        some, full = Causal().tiles(q, kv)
        same = _same_span(q.positions // self.size, kv.positions // self.size)
        return some & same[0], full & same[1]


@dataclasses.dataclass(frozen=True)
class _Held:
    """A NumPy array held by a mask, compared and hashed by a digest, so that the mask can be a static argument."""

    array: np.ndarray = dataclasses.field(compare=False)
    digest: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Self:
        array = np.ascontiguousarray(array)
        array.flags.writeable = False
        return cls(array, hashlib.sha256(f"{array.shape}{array.dtype}".encode() + array.tobytes()).digest())

    def __repr__(self) -> str:
        return f"array{self.array.shape}"


def _host(what: str, x: Any) -> np.ndarray:
    if isinstance(x, jax.core.Tracer):
        raise InputError(what, "is traced", "A mask is static: pass a NumPy array, or use segment ids")
    return np.array(x)


def _document_ids(name: str, x: Any) -> _Held:
    argument = f"Document({name}=...)"
    ids = _host(argument, x)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        remedy = "It needs one integer for each token. Pass ids that differ between batch rows as q_segment_ids"
        raise InputError(argument, f"got {ids.dtype} of shape {ids.shape}", remedy)
    fitting(argument, ids)
    return _Held.of(ids.astype(np.int32, copy=False))


@dataclasses.dataclass(frozen=True, init=False)
class Document(Mask):
    """A query sees the keys of its own document. Documents are the same in every batch row.

    `q_ids` and `kv_ids` are host integers, one for each token of the whole sequence; a negative id is padding. Without
    `kv_ids`, keys have the ids of queries.
    """

    q_ids: _Held
    kv_ids: _Held

    def __init__(self, q_ids: Any, kv_ids: Any = None):
        object.__setattr__(self, "q_ids", _document_ids("q_ids", q_ids))
        object.__setattr__(self, "kv_ids", self.q_ids if kv_ids is None else _document_ids("kv_ids", kv_ids))

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

    def _ids(self, q: Coordinates, kv: Coordinates) -> list[Any]:
        """The ids of these queries and keys: NumPy arrays where the index is one, else JAX arrays."""
        held = ((self.q_ids.array, q.index), (self.kv_ids.array, kv.index))
        on_side = ((ids if isinstance(index, np.ndarray) else jnp.asarray(ids), index) for ids, index in held)
        return [ids[index.clip(0, ids.size - 1)] for ids, index in on_side]


@dataclasses.dataclass(frozen=True, init=False)
class Numpy(Mask):
    """A dense NumPy `array` `[T, S]` for whole sequences in natural order, true where a query sees a key."""

    held: _Held

    def __init__(self, array: Any):
        held = _host("Numpy", array)
        if held.ndim != 2 or np.issubdtype(held.dtype, np.inexact):
            fact = f"got {held.dtype} of shape {held.shape}"
            raise InputError("Numpy", fact, "It needs booleans [T, S]; pass numbers as bias=")
        object.__setattr__(self, "held", _Held.of(held.astype(bool, copy=False)))

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
    (q_low, q_high), (_, kv_high) = _ends(q_ids), _ends(kv_ids)
    return some & (q_high >= 0)[..., :, None] & (kv_high >= 0)[..., None, :], full & (q_low >= 0)[..., :, None]


def _same_span(q: Any, kv: Any) -> tuple[Any, Any]:
    """`(some, full)`: query and key tiles with overlapping ranges of values; tiles whose values are all equal."""
    q_low, q_high = (x[..., :, None] for x in _ends(q))
    kv_low, kv_high = (x[..., None, :] for x in _ends(kv))
    return (kv_low <= q_high) & (kv_high >= q_low), (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)


@dataclasses.dataclass(frozen=True)
class Predicate(Mask):
    """A query sees a key where `seen(q_positions, kv_positions)` is true; `seen` uses `jax.numpy` and broadcasts."""

    seen: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        try:
            inspect.signature(self.seen).bind(None, None)
        except ValueError:  # a function written in C may have no signature
            return
        except TypeError as error:
            remedy = "It needs a function (q_positions, kv_positions) -> booleans"
            raise InputError("Predicate", f"got {self.seen!r}: {error}", remedy) from error

    def __repr__(self) -> str:
        return f"Predicate({getattr(self.seen, '__name__', type(self.seen).__name__)})"

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        pairs = jnp.broadcast_shapes(q.positions.shape, kv.positions.shape)
        returned = self._called(q.positions, kv.positions)
        try:
            seen = jnp.asarray(returned)
            if seen.dtype != jnp.bool_:
                raise TypeError(seen.dtype)
            return jnp.broadcast_to(seen, jnp.broadcast_shapes(seen.shape, pairs))
        except (TypeError, ValueError) as error:
            shaped = hasattr(returned, "shape")
            got = f"{returned.dtype} of shape {returned.shape}" if shaped else type(returned).__name__
            remedy = f"It needs booleans, true where a query sees a key, that broadcast with the pairs, {pairs}"
            raise InputError(repr(self), f"returned {got}", remedy) from error

    def _called(self, q: Any, kv: Any) -> Any:
        try:
            return self.seen(q, kv)
        except jax.errors.TracerArrayConversionError as error:
            cause, fact = error, "gives its traced arguments to a NumPy function"
        except (jax.errors.TracerBoolConversionError, ValueError) as error:
            if isinstance(error, ValueError) and "truth value of an array" not in str(error):
                raise
            cause, fact = error, "takes the truth value of an array, as `if`, `and`, `or`, `not` and `a < b < c` do"
        raise InputError(repr(self), fact, "Use `&`, `|`, `~` and functions of jax.numpy in it") from cause
