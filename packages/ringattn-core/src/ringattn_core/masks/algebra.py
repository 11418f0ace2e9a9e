# SPDX-License-Identifier: Apache-2.0
"""What a mask is: a set of (query, key) pairs, combined by `&`, `|` and `~`, and evaluated lazily, tile by tile."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32
from typing_extensions import override

from ..errors import InputError


class Coordinates(NamedTuple):
    """The `positions` of some tokens, which most masks compare, and each token's `index` in the whole sequence.

    The arrays are of NumPy or of JAX: masks use only operators and methods that both libraries have.
    """

    positions: Int32[Array | np.ndarray, "*tokens"]
    index: Int32[Array | np.ndarray, "*tokens"]  # pyright: ignore[reportIncompatibleMethodOverride]

    def rows(self) -> "Coordinates":
        """The tokens as queries: appends an axis, `[..., T, 1]`, to broadcast against keys."""
        return Coordinates(self.positions[..., None], self.index[..., None])

    def columns(self) -> "Coordinates":
        """The tokens as keys: inserts an axis, `[..., 1, S]`, to broadcast against queries."""
        return Coordinates(self.positions[..., None, :], self.index[..., None, :])


class Mask:
    """A set of (query, key) pairs: the pairs in which the query sees the key. `&`, `|` and `~` are set operations.

    Masks compare differences of positions. Positions are below 2^30 in magnitude, so that differences fit int32.
    `visible(q, kv)` broadcasts queries (`q.rows()`) against keys (`kv.columns()`). `tiles(q, kv)` takes the tokens of
    each tile on the last axis, `q [g, nq, tq]` and `kv [g, nk, tk]`, and returns `(some, full)`, each
    `[g, nq, nk]`: `some` is true wherever any pair is visible, `full` only where every pair is. A mask that
    defines `tiles` computes both from the minima and maxima of a tile, without arrays of size `T * S`.
    """

    __array_ufunc__ = None  # for `array & mask`, NumPy then calls `mask.__rand__`

    @property
    def _parts(self) -> tuple["Mask", ...]:
        """The masks that this mask combines: its fields that are masks."""
        return tuple(x for x in vars(self).values() if isinstance(x, Mask))

    @property
    def bounded(self) -> bool:
        """Whether this mask, and every mask that it combines, defines `tiles`."""
        return type(self).tiles is not Mask.tiles and all(part.bounded for part in self._parts)

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define visible(q, kv)")

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        """Evaluates the mask for every pair, one row of tiles at a time; exact, and slower than bounds of positions."""
        return _evaluated((self,), q, kv)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The `(queries, keys)` shape of each array that the mask holds; all must equal the global lengths."""
        shape = getattr(self, "shape", None)
        own = () if shape is None else (tuple(shape),)
        return own + tuple(held for part in self._parts for held in part.shapes())

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
        fact = f"{type(self).__name__} has no truth value, so `and`, `or`, `not` and `if` cannot use it"
        remedy = "Combine masks with `&`, `|` and `~`, and ask with `is None` whether there is one"
        raise InputError("mask", fact, remedy)


def _mask(x: Any) -> Mask:
    if not isinstance(x, Mask):
        raise InputError("mask", f"got {type(x).__name__}", "Combine masks with masks: wrap an array in masks.Numpy")
    return x


@dataclasses.dataclass(frozen=True)
class _Pair(Mask):
    """Two masks `a` and `b`, whose boolean values for each (query, key) pair are joined by `combine`."""

    a: Mask
    b: Mask
    combine: ClassVar[Callable[[Any, Any], Any]]

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return type(self).combine(self.a.visible(q, kv), self.b.visible(q, kv))

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        (some_a, full_a), (some_b, full_b) = self.a.tiles(q, kv), self.b.tiles(q, kv)
        return type(self).combine(some_a, some_b), type(self).combine(full_a, full_b)


class And(_Pair):
    """The intersection of two masks, `a & b`."""

    combine = operator.and_


class Or(_Pair):
    """The union of two masks, `a | b`."""

    combine = operator.or_


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """The complement of a mask, `~a`."""

    a: Mask

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return ~self.a.visible(q, kv)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        some, full = self.a.tiles(q, kv)
        return ~full, ~some


def tiles_of(masks: Sequence[Mask], q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
    """`(some, full)`, each `[g, nq, nk]`: tiles in which any of `masks` shows a pair; in which all show every pair.

    Masks that are not `bounded` are evaluated pair by pair, all in one loop.
    """
    found, loose = [mask.tiles(q, kv) for mask in masks if mask.bounded], [mask for mask in masks if not mask.bounded]
    found += [_evaluated(loose, q, kv)] if loose else []
    return any_of(some for some, _ in found), all_of(full for _, full in found)


def _evaluated(masks: Sequence[Mask], q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
    """`(some, full)`, as `tiles_of` returns them, from every (query, key) pair, one row of tiles at a time."""
    groups = np.broadcast_shapes(*(x.shape[:1] for x in (*q, *kv)))
    pairs = *groups, kv.index.shape[1], q.index.shape[2], kv.index.shape[2]

    def row(tile: Coordinates) -> tuple[jax.Array, jax.Array]:
        rows = Coordinates(*(x[:, None, :, None] for x in tile))
        seen = [jnp.broadcast_to(mask.visible(rows, kv.columns()), pairs) for mask in masks]
        return any_of(seen).any((-2, -1)), all_of(seen).all((-2, -1))

    some, full = jax.lax.map(row, Coordinates(*(jnp.swapaxes(x, 0, 1) for x in q)))
    return jnp.swapaxes(some, 0, 1), jnp.swapaxes(full, 0, 1)


def all_of(sets: Iterable[Any]) -> Any:
    """The intersection of `sets`, masks or boolean arrays; `None`, meaning every pair, if there are none."""
    found = list(sets)
    return functools.reduce(operator.and_, found) if found else None


def any_of(sets: Iterable[Any]) -> Any:
    """The union of `sets`, one or more masks or boolean arrays."""
    return functools.reduce(operator.or_, sets)
