# SPDX-License-Identifier: Apache-2.0
"""The kinds of masks: from positions, document ids, a dense array, or a function."""

import dataclasses
import functools
import hashlib
import inspect
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
from .algebra import Coordinates, Mask, all_of
from .reach import INT32_MAX, INT32_MIN, Interval, Reach


def _refuse_no_integer(mask: Mask, name: str, least: int) -> None:
    remedy = f"It needs an integer of at least {least} and below 2^31"
    whole(f"{type(mask).__name__}({name}=...)", getattr(mask, name), least, remedy=remedy)


class _OfReach(Mask):
    """A mask that a `Reach` describes."""

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        first, last = self.reach.bounds(q.positions)
        sides = [] if first is None else [kv.positions >= first]
        sides += [] if last is None else [kv.positions <= last]
        return all_of(sides or [kv.positions - q.positions == kv.positions - q.positions])

    @override
    def interval(self, q: Coordinates, natural: bool) -> Interval:
        return self.reach.bounds(q.positions)

    @property
    @override
    def contains_own(self) -> bool:
        return self.reach.right is None or self.reach.right >= 0

    @property
    @override
    def monotone(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Full(_OfReach):
    """The mask in which every query sees every key."""


@dataclasses.dataclass(frozen=True)
class Causal(_OfReach):
    """A query sees keys at most `offset` positions after it; by default none after it."""

    offset: int = 0

    def __post_init__(self) -> None:
        _refuse_no_integer(self, "offset", -(2**31))

    @property
    @override
    def reach(self) -> Reach:
        return Reach(causal=self.offset == 0, right=self.offset or None)


@dataclasses.dataclass(frozen=True)
class Local(_OfReach):
    """A query sees keys at most `left` positions before and `right` positions after it; `None` is unbounded."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                _refuse_no_integer(self, name, 0)

    @property
    @override
    def reach(self) -> Reach:
        return Reach(left=self.left, right=self.right)


@dataclasses.dataclass(frozen=True)
class Chunked(_OfReach):
    """A query sees keys in its own chunk of `size` positions that are not after it."""

    size: int

    def __post_init__(self) -> None:
        _refuse_no_integer(self, "size", 1)

    @property
    @override
    def reach(self) -> Reach:
        return Reach(chunk=self.size)


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
    def interval(self, q: Coordinates, natural: bool) -> Interval:
        return Interval(None, jnp.full_like(q.positions, self.length - 1))

    @property
    @override
    def monotone(self) -> bool:
        return True


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
    `kv_ids`, keys have the ids of queries. Documents are intervals if each has consecutive keys, and positions are
    indices in the sequence.
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
    def interval(self, q: Coordinates, natural: bool) -> Interval | None:
        ends = _runs_of(self.q_ids, self.kv_ids) if natural else None
        return None if ends is None else Interval(*(jnp.asarray(x)[q.index.clip(0, x.size - 1)] for x in ends))

    @property
    @override
    def contains_own(self) -> bool:
        return self.q_ids == self.kv_ids and bool((self.q_ids.array >= 0).all())

    @property
    @override
    def monotone(self) -> bool:
        return self.contains_own and _runs_of(self.q_ids, self.kv_ids) is not None

    def _ids(self, q: Coordinates, kv: Coordinates) -> list[jax.Array]:
        """The ids of these queries and keys."""
        held = ((self.q_ids.array, q.index), (self.kv_ids.array, kv.index))
        return [jnp.asarray(ids)[index.clip(0, ids.size - 1)] for ids, index in held]


@functools.lru_cache(maxsize=16)
def _runs_of(q_ids: _Held, kv_ids: _Held) -> tuple[np.ndarray, np.ndarray] | None:
    """For each query, the first and the last index of the keys with its id; `None` if a document's keys are scattered.

    A query of padding, or of a document without keys, gets an empty interval.
    """
    ids = kv_ids.array
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
    ends, of_run = np.append(starts[1:], ids.size) - 1, ids[starts]
    real = of_run >= 0
    starts, ends, of_run = starts[real], ends[real], of_run[real]
    order = np.argsort(of_run, kind="stable")
    starts, ends, of_run = starts[order], ends[order], of_run[order]
    if (np.diff(of_run) == 0).any():
        return None
    at = np.searchsorted(of_run, q_ids.array).clip(0, max(of_run.size - 1, 0))
    known = (of_run[at] == q_ids.array) if of_run.size else np.zeros(q_ids.array.shape, bool)
    first, last = np.full(known.shape, INT32_MAX, np.int32), np.full(known.shape, INT32_MIN, np.int32)
    first[known], last[known] = starts[at[known]], ends[at[known]]
    return first, last


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
