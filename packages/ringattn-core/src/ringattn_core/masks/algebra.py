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
    """The `positions` of some tokens, which masks compare, and their `index` in the whole sequence.

    The arrays may be NumPy's or JAX's: masks use only operators and methods that both have.
    """

    positions: Int32[Array | np.ndarray, "*tokens"]
    index: Int32[Array | np.ndarray, "*tokens"]  # pyright: ignore[reportIncompatibleMethodOverride]

    def rows(self) -> "Coordinates":
        """The tokens as queries: adds an axis for the keys at the end."""
        return Coordinates(self.positions[..., None], self.index[..., None])

    def columns(self) -> "Coordinates":
        """The tokens as keys: adds an axis for the queries before the last."""
        return Coordinates(self.positions[..., None, :], self.index[..., None, :])


class Mask:
    """A set of (query, key) pairs: the pairs in which the query sees the key. `&`, `|` and `~` are set operations.

    Masks compare differences of positions. Positions are below 2^30 in magnitude, so that differences fit int32.
    `visible(q, kv)` broadcasts queries (`q.rows()`) against keys (`kv.columns()`). `tiles(q, kv)` takes the tokens of
    each tile on the last axis, `q [g, nq, tq]` and `kv [g, nk, tk]`, and returns `(some, full)`, each
    `[g, nq, nk]`: `some` is true wherever any pair is visible, `full` only where every pair is. A `bounded` mask
    computes both from the minima and maxima of a tile, without arrays of size `T * S`.
    """

    __array_ufunc__ = None  # for `array & mask`, NumPy then calls `mask.__rand__`

    @property
    def _parts(self) -> tuple["Mask", ...]:
        """The masks that this mask combines: its fields that are masks."""
        return tuple(x for x in vars(self).values() if isinstance(x, Mask))

    @property
    def bounded(self) -> bool:
        return all(part.bounded for part in self._parts)

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define visible(q, kv)")

    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        """Evaluates every pair, one row of tiles at a time: exact, also for a mask that is not `bounded`."""
        return _evaluated((self,), q, kv)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The `(queries, keys)` shapes of the arrays in the mask; each must equal the global lengths."""
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
        raise InputError(
            "mask",
            f"{type(self).__name__} has no truth value, so `and`, `or`, `not` and `if` cannot use it",
            "Combine masks with `&`, `|` and `~`, and ask with `is None` whether there is one",
        )


def _mask(x: Any) -> Mask:
    if not isinstance(x, Mask):
        raise InputError("mask", f"got {type(x).__name__}", "Combine masks with masks: wrap an array in masks.Numpy")
    return x


@dataclasses.dataclass(frozen=True)
class _Pair(Mask):
    """Two masks, combined pair by pair by `combine`."""

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
    """Tiles in which any mask shows a pair, and tiles in which all masks show every pair.

    One loop evaluates all masks that are not `bounded`.
    """
    if len(masks) == 1:
        return masks[0].tiles(q, kv)
    found, loose = [mask.tiles(q, kv) for mask in masks if mask.bounded], [mask for mask in masks if not mask.bounded]
    found += [_evaluated(loose, q, kv)] if loose else []
    return any_of(some for some, _ in found), all_of(full for _, full in found)


def _evaluated(masks: Sequence[Mask], q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
    """`tiles_of` from the value of every pair, one row of tiles at a time."""

    def row(tile: Coordinates) -> tuple[jax.Array, jax.Array]:
        rows, columns = Coordinates(*(x[:, None, :, None] for x in tile)), Coordinates(*(x[:, :, None, :] for x in kv))
        pairs = tile.index.shape[0], kv.index.shape[1], tile.index.shape[1], kv.index.shape[2]
        seen = [jnp.broadcast_to(mask.visible(rows, columns), pairs) for mask in masks]
        return any_of(seen).any((-2, -1)), all_of(seen).all((-2, -1))

    groups = np.broadcast_shapes(q.index.shape[:1], kv.index.shape[:1], q.positions.shape[:1], kv.positions.shape[:1])
    q = Coordinates(*(jnp.broadcast_to(x, (*groups, *x.shape[1:])) for x in q))
    kv = Coordinates(*(jnp.broadcast_to(x, (*groups, *x.shape[1:])) for x in kv))
    some, full = jax.lax.map(row, Coordinates(*(jnp.swapaxes(x, 0, 1) for x in q)))
    return jnp.swapaxes(some, 0, 1), jnp.swapaxes(full, 0, 1)


def all_of(sets: Iterable[Any]) -> Any:
    """The intersection of `sets`, masks or boolean arrays; `None`, meaning every pair, if there are none."""
    found = list(sets)
    return functools.reduce(operator.and_, found) if found else None


def any_of(sets: Iterable[Any]) -> Any:
    """The union of `sets`, one or more masks or boolean arrays."""
    return functools.reduce(operator.or_, sets)
