# SPDX-License-Identifier: Apache-2.0
"""Which keys a query may see: the mask algebra, evaluated lazily, tile by tile."""

import dataclasses
import hashlib
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from ..errors import InputError
from .int32 import fitting


class Coordinates(NamedTuple):
    """Where some tokens are: the positions that masks compare, and the index in the whole sequence.

    Masks use operators and methods only, so that NumPy arrays serve as well as traced ones.
    """

    positions: Int32[Array | np.ndarray, "*tokens"]
    index: Int32[Array | np.ndarray, "*tokens"]  # pyright: ignore[reportIncompatibleMethodOverride]

    def rows(self) -> "Coordinates":
        """Tokens as queries: an axis for the keys follows."""
        return Coordinates(self.positions[..., None], self.index[..., None])

    def columns(self) -> "Coordinates":
        """Tokens as keys: an axis for the queries precedes."""
        return Coordinates(self.positions[..., None, :], self.index[..., None, :])


class Mask:
    """A set of (query, key) pairs; `&`, `|` and `~` are those of sets.

    Positions are below 2^30 in magnitude, so that differences of two fit an int32; masks compare differences.
    `visible(q, kv)` broadcasts `rows` of queries against `columns` of keys. `tiles(q, kv)` takes the tokens of
    each tile on the last axis, `q [g, nq, tq]` and `kv [g, nk, tk]`, and returns `(some, all)`, each
    `[g, nq, nk]`: `some` is true wherever any pair is visible, `all` only where every pair is. Where `bounded`,
    both come from minima and maxima, at no cost of size `T * S`.
    """

    bounded: bool = True
    __array_ufunc__ = None  # NumPy arrays on the left leave the operators to the mask.

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define visible(q, kv)")

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        """By evaluation: exact, one row of tiles at a time."""

        def row(tile: Coordinates) -> tuple[jax.Array, jax.Array]:
            seen = self.visible(
                Coordinates(*(x[:, None, :, None] for x in tile)), Coordinates(*(x[:, :, None, :] for x in kv))
            )
            seen = jnp.broadcast_to(
                seen, (tile.index.shape[0], kv.index.shape[1], tile.index.shape[1], kv.index.shape[2])
            )
            return seen.any((-2, -1)), seen.all((-2, -1))

        groups = np.broadcast_shapes(
            q.index.shape[:1], kv.index.shape[:1], q.positions.shape[:1], kv.positions.shape[:1]
        )
        q = Coordinates(*(jnp.broadcast_to(x, (*groups, *x.shape[1:])) for x in q))
        kv = Coordinates(*(jnp.broadcast_to(x, (*groups, *x.shape[1:])) for x in kv))
        some, every = jax.lax.map(row, Coordinates(*(jnp.swapaxes(x, 0, 1) for x in q)))
        return jnp.swapaxes(some, 0, 1), jnp.swapaxes(every, 0, 1)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of how many queries and keys every array in it knows: as many as there are."""
        shape = getattr(self, "shape", None)
        return () if shape is None else (tuple(shape),)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _mask(other))

    def __rand__(self, other: Any) -> "Mask":
        return And(_mask(other), self)

    def __ror__(self, other: Any) -> "Mask":
        return Or(_mask(other), self)

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise InputError(
            "mask",
            f"{type(self).__name__} has no truth value, so `and`, `or`, `not` and `if` cannot use it",
            "Combine masks with `&`, `|` and `~`, and ask with `is None` whether there is one",
        )


def _mask(x: Any) -> Mask:
    if not isinstance(x, Mask):
        raise InputError("mask", f"got {type(x).__name__}", "Combine masks with masks: masks.Numpy holds an array")
    return x


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
class And(Mask):
    a: Mask
    b: Mask

    @property
    def bounded(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.a.bounded and self.b.bounded

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.a.shapes(), *self.b.shapes())

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return self.a.visible(q, kv) & self.b.visible(q, kv)

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        (some_a, all_a), (some_b, all_b) = self.a.tiles(q, kv), self.b.tiles(q, kv)
        return some_a & some_b, all_a & all_b


@dataclasses.dataclass(frozen=True)
class Or(Mask):
    a: Mask
    b: Mask

    @property
    def bounded(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.a.bounded and self.b.bounded

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.a.shapes(), *self.b.shapes())

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return self.a.visible(q, kv) | self.b.visible(q, kv)

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        (some_a, all_a), (some_b, all_b) = self.a.tiles(q, kv), self.b.tiles(q, kv)
        return some_a | some_b, all_a | all_b


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    a: Mask

    @property
    def bounded(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.a.bounded

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.a.shapes()

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return ~self.a.visible(q, kv)

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        some, every = self.a.tiles(q, kv)
        return ~every, ~some


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every pair."""

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (q.index == q.index) & (kv.index == kv.index)

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        first = q.index[..., 0]
        every = _rows(first == first) & _columns(kv.index[..., 0] == kv.index[..., 0])
        return every, every


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """Keys no later than the query, or than `offset` after it."""

    offset: int = 0

    def __post_init__(self) -> None:
        _whole_number(self, "offset", -(2**31))

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return kv.positions - q.positions <= self.offset

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        i, j = q.positions, kv.positions
        some = _columns(j.min(-1)) - _rows(i.max(-1)) <= self.offset
        return some, _columns(j.max(-1)) - _rows(i.min(-1)) <= self.offset


@dataclasses.dataclass(frozen=True)
class Local(Mask):
    """Keys within `left` before and `right` after the query, both ends inclusive; `None` is unbounded."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                _whole_number(self, name, 0)

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        seen = Full().visible(q, kv)
        if self.left is not None:
            seen = seen & (q.positions - kv.positions <= self.left)
        if self.right is not None:
            seen = seen & (kv.positions - q.positions <= self.right)
        return seen

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        some, every = Full().tiles(q, kv)
        q_low, q_high = _rows(q.positions.min(-1)), _rows(q.positions.max(-1))
        kv_low, kv_high = _columns(kv.positions.min(-1)), _columns(kv.positions.max(-1))
        if self.left is not None:
            some, every = some & (q_low - kv_high <= self.left), every & (q_high - kv_low <= self.left)
        if self.right is not None:
            some, every = some & (kv_low - q_high <= self.right), every & (kv_high - q_low <= self.right)
        return some, every


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """The query's own chunk of `size` positions, causally."""

    size: int

    def __post_init__(self) -> None:
        _whole_number(self, "size", 1)

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (q.positions // self.size == kv.positions // self.size) & (kv.positions <= q.positions)

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        some, every = Causal().tiles(q, kv)
        same = _same_span(q.positions // self.size, kv.positions // self.size)
        return some & same[0], every & same[1]


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` positions, for every query. `Prefix(n) | Causal()` is a prefix language model."""

    length: int

    def __post_init__(self) -> None:
        _whole_number(self, "length", 0)

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return (kv.positions < self.length) & (q.positions == q.positions)

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        some, every = Full().tiles(q, kv)
        return some & _columns(kv.positions.min(-1) < self.length), every & _columns(kv.positions.max(-1) < self.length)


class _Held:
    """A host array that a mask holds: hashed by content, once."""

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
        raise InputError(what, "is traced", "A mask shapes the program: pass NumPy, or segment ids for what varies")
    return np.array(x)


def _document_ids(name: str, x: Any) -> np.ndarray:
    argument = f"Document({name}=...)"
    ids = _host(argument, x)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            argument,
            f"got {ids.dtype} of shape {ids.shape}",
            "It needs one integer for each token; for those of each batch row there is q_segment_ids",
        )
    fitting(argument, ids)
    return ids.astype(np.int32, copy=False)


@dataclasses.dataclass(frozen=True, init=False)
class Document(Mask):
    """Pairs of one document, by the id of each token of the whole sequence; a negative id is padding."""

    q_ids: _Held
    kv_ids: _Held

    def __init__(self, q_ids: Any, kv_ids: Any = None):
        q_held = _Held(_document_ids("q_ids", q_ids))
        object.__setattr__(self, "q_ids", q_held)
        object.__setattr__(self, "kv_ids", q_held if kv_ids is None else _Held(_document_ids("kv_ids", kv_ids)))

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.q_ids.array.size, self.kv_ids.array.size),)

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        q_ids, kv_ids = self._ids(q, kv)
        return (q_ids == kv_ids) & (q_ids >= 0)

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        return same_segment(*self._ids(q, kv))

    def _ids(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        return _take(self.q_ids.array, q.index), _take(self.kv_ids.array, kv.index)


@dataclasses.dataclass(frozen=True, init=False)
class Numpy(Mask):
    """A dense array `[T, S]` of the whole sequence, true where visible, addressed by global index."""

    held: _Held
    bounded = False

    def __init__(self, array: Any):
        held = _host("Numpy", array)
        if held.ndim != 2 or np.issubdtype(held.dtype, np.inexact):
            raise InputError(
                "Numpy", f"got {held.dtype} of shape {held.shape}", "It needs booleans for (queries, keys); add a bias"
            )
        object.__setattr__(self, "held", _Held(held.astype(bool, copy=False)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.array.shape

    def visible(self, q: Coordinates, kv: Coordinates) -> Bool[Array, "..."]:
        rows, columns = self.shape
        index = jnp.clip(q.index, 0, rows - 1), jnp.clip(kv.index, 0, columns - 1)
        return jnp.asarray(self.held.array)[index]


def same_segment(q_ids: Any, kv_ids: Any) -> tuple[Any, Any]:
    """`(some, all)` of "equal ids, both non-negative", for tiles of ids `[g, nq, tq]` and `[g, nk, tk]`."""
    some, every = _same_span(q_ids, kv_ids)
    some = some & _rows(q_ids.max(-1) >= 0) & _columns(kv_ids.max(-1) >= 0)
    return some, every & _rows(q_ids.min(-1) >= 0)


def _same_span(q: Any, kv: Any) -> tuple[Any, Any]:
    q_low, q_high, kv_low, kv_high = _rows(q.min(-1)), _rows(q.max(-1)), _columns(kv.min(-1)), _columns(kv.max(-1))
    return (kv_low <= q_high) & (kv_high >= q_low), (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)


def _take(ids: np.ndarray, index: Any) -> Any:
    if isinstance(index, np.ndarray):
        return ids[np.clip(index, 0, ids.size - 1)]
    return jnp.asarray(ids)[jnp.clip(index, 0, ids.size - 1)]
