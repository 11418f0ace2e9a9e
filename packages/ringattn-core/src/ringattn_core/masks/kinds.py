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
from .algebra import Coordinates, Mask
from .int32 import fitting


def _whole_number(mask: Mask, name: str, least: int) -> None:
    x = getattr(mask, name)
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or not least <= x < 2**31:
        what = f"{type(mask).__name__}({name}=...)"
        raise InputError(what, f"got {x!r}", f"It needs an integer of at least {least} and below 2^31")


def _ends(x: Any) -> tuple[Any, Any]:
    """The minimum and the maximum of each tile."""
    return x.min(-1), x.max(-1)


def _first_and_last(q: Coordinates, kv: Coordinates) -> tuple[list[Coordinates], list[Coordinates]]:
    """The tokens of least and of greatest position in each tile: of queries as rows, of keys as columns."""
    q_ends, kv_ends = ([Coordinates(end, x.index[..., 0]) for end in _ends(x.positions)] for x in (q, kv))
    return [x.rows() for x in q_ends], [x.columns() for x in kv_ends]


class _Monotone(Mask):
    """A mask in which a query that sees a key sees every earlier key, and every later query sees that key too.

    So a tile has a visible pair exactly if its last query sees its first key, and only visible pairs exactly if its
    first query sees its last key.
    """

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        (q_first, q_last), (kv_first, kv_last) = _first_and_last(q, kv)
        return self.visible(q_last, kv_first), self.visible(q_first, kv_last)


@dataclasses.dataclass(frozen=True)
class Full(_Monotone):
    """Every pair."""

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (q.index == q.index) & (kv.index == kv.index)


@dataclasses.dataclass(frozen=True)
class Causal(_Monotone):
    """Keys at most `offset` positions after the query; by default none after it."""

    offset: int = 0

    def __post_init__(self) -> None:
        _whole_number(self, "offset", -(2**31))

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return kv.positions - q.positions <= self.offset


@dataclasses.dataclass(frozen=True)
class Prefix(_Monotone):
    """Keys at the first `length` positions. `Prefix(n) | Causal()` is the mask of a prefix language model."""

    length: int

    def __post_init__(self) -> None:
        _whole_number(self, "length", 0)

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (kv.positions < self.length) & (q.positions == q.positions)


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
        return self._between(q, kv, q, kv)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        (q_first, q_last), (kv_first, kv_last) = _first_and_last(q, kv)
        some = self._between(q_last, kv_first, q_first, kv_last)
        return some, self._between(q_first, kv_last, q_last, kv_first)

    def _between(self, q: Coordinates, kv: Coordinates, q_left: Coordinates, kv_left: Coordinates) -> Any:
        """Whether `q` and `kv` keep to the right side, and `q_left` and `kv_left` to the left side."""
        right = Full() if self.right is None else Causal(self.right)
        seen = right.visible(q, kv)
        return seen if self.left is None else seen & Causal(self.left).visible(kv_left, q_left)


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


def _document_ids(name: str, x: Any) -> _Held:
    argument = f"Document({name}=...)"
    ids = _host(argument, x)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        remedy = "It needs one integer for each token. Pass ids that differ between batch rows as q_segment_ids"
        raise InputError(argument, f"got {ids.dtype} of shape {ids.shape}", remedy)
    fitting(argument, ids)
    return _Held(ids.astype(np.int32, copy=False))


@dataclasses.dataclass(frozen=True, init=False)
class Document(Mask):
    """Keys of the query's own document, the same in every row of the batch.

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
        """The ids of queries and of keys, on the host where their index is."""
        held = ((self.q_ids.array, q.index), (self.kv_ids.array, kv.index))
        on_side = ((ids if isinstance(index, np.ndarray) else jnp.asarray(ids), index) for ids, index in held)
        return [ids[index.clip(0, ids.size - 1)] for ids, index in on_side]


@dataclasses.dataclass(frozen=True, init=False)
class Numpy(Mask):
    """A dense host `array` `[T, S]` of the whole sequence, true where visible, addressed by global index."""

    held: _Held
    bounded = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __init__(self, array: Any):
        held = _host("Numpy", array)
        if held.ndim != 2 or np.issubdtype(held.dtype, np.inexact):
            fact = f"got {held.dtype} of shape {held.shape}"
            raise InputError("Numpy", fact, "It needs booleans [T, S]; pass numbers as bias=")
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
    (q_low, q_high), (_, kv_high) = _ends(q_ids), _ends(kv_ids)
    return some & (q_high >= 0)[..., :, None] & (kv_high >= 0)[..., None, :], full & (q_low >= 0)[..., :, None]


def _same_span(q: Any, kv: Any) -> tuple[Any, Any]:
    """Tile pairs whose values overlap, and tile pairs that hold one and the same value."""
    q_low, q_high = (x[..., :, None] for x in _ends(q))
    kv_low, kv_high = (x[..., None, :] for x in _ends(kv))
    return (kv_low <= q_high) & (kv_high >= q_low), (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)


@dataclasses.dataclass(frozen=True)
class Predicate(Mask):
    """Pairs where `seen(q_positions, kv_positions)` is true. `seen` uses `jax.numpy` and broadcasts."""

    seen: Callable[[Any, Any], Any]
    bounded = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def __post_init__(self) -> None:
        try:
            inspect.signature(self.seen).bind(None, None)
        except ValueError:  # a function of C may have no signature
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
