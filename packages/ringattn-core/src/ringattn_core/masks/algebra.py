# SPDX-License-Identifier: Apache-2.0
"""What a mask is: a set of (query, key) pairs, evaluated lazily, tile by tile, and combined by `&`, `|` and `~`."""

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32
from typing_extensions import override

from ..errors import InputError


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


class _Pair(Mask):
    """Two masks, combined pair by pair by `combine`."""

    a: Mask
    b: Mask
    combine: Any

    @property
    @override
    def bounded(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.a.bounded and self.b.bounded

    @override
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.a.shapes(), *self.b.shapes())

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return type(self).combine(self.a.visible(q, kv), self.b.visible(q, kv))

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        (some_a, all_a), (some_b, all_b) = self.a.tiles(q, kv), self.b.tiles(q, kv)
        return type(self).combine(some_a, some_b), type(self).combine(all_a, all_b)


@dataclasses.dataclass(frozen=True)
class And(_Pair):
    """The pairs that are in both."""

    a: Mask
    b: Mask
    combine = staticmethod(operator.and_)


@dataclasses.dataclass(frozen=True)
class Or(_Pair):
    """The pairs that are in either."""

    a: Mask
    b: Mask
    combine = staticmethod(operator.or_)


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """The pairs that are not in it."""

    a: Mask

    @property
    @override
    def bounded(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.a.bounded

    @override
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.a.shapes()

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return ~self.a.visible(q, kv)

    @override
    def tiles(self, q: Coordinates, kv: Coordinates) -> tuple[Any, Any]:
        some, every = self.a.tiles(q, kv)
        return ~every, ~some


def all_of(sets: Iterable[Any]) -> Any:
    """The intersection of masks, or of boolean arrays; `None` of no set, which is every pair."""
    found = list(sets)
    return functools.reduce(operator.and_, found) if found else None


def any_of(sets: Iterable[Any]) -> Any:
    """The union of masks, or of boolean arrays, of which there is one at least."""
    return functools.reduce(operator.or_, sets)
