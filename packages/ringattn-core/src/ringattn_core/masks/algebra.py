# SPDX-License-Identifier: Apache-2.0
"""What a mask is: a set of (query, key) pairs, combined by `&`, `|` and `~`."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Int32
from typing_extensions import override

from ..errors import InputError
from .reach import Interval, Reach, moved


class Coordinates(NamedTuple):
    """The `positions` of some tokens, which most masks compare, and each token's `index` in the whole sequence.

    The arrays are of NumPy or of JAX: masks use only operators and methods that both libraries have.
    """

    positions: Int32[Any, "*tokens"]
    index: Int32[Any, "*tokens"]  # pyright: ignore[reportIncompatibleMethodOverride]

    def rows(self) -> "Coordinates":
        """The tokens as queries: appends an axis, `[..., T, 1]`, to broadcast against keys."""
        return Coordinates(self.positions[..., None], self.index[..., None])

    def columns(self) -> "Coordinates":
        """The tokens as keys: inserts an axis, `[..., 1, S]`, to broadcast against queries."""
        return Coordinates(self.positions[..., None, :], self.index[..., None, :])


class Mask:
    """A set of (query, key) pairs: the pairs in which the query sees the key. `&`, `|` and `~` are set operations.

    A mask must define `visible`. It should define `interval` if the keys that a query sees are those between two
    positions: such a mask takes 8 bytes a query. Any other mask takes a bit for each pair of a query and a key.
    Positions are below 2^30 in magnitude, so that their differences fit int32.
    """

    __array_ufunc__ = None  # for `array & mask`, NumPy then calls `mask.__rand__`

    @property
    def _parts(self) -> tuple["Mask", ...]:
        """The masks that this mask combines: its fields that are masks."""
        return tuple(x for x in vars(self).values() if isinstance(x, Mask))

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        """Whether queries see keys, as booleans; queries (`q.rows()`) broadcast against keys (`kv.columns()`)."""
        raise NotImplementedError(f"{type(self).__name__} must define visible(q, kv)")

    def interval(self, q: Coordinates, natural: bool) -> Interval | None:
        """The interval of key positions that each query of `q` sees; `None` if the mask has none.

        `natural`: positions are indices in the sequence, both of queries and of keys.
        """
        return None

    @property
    def contains_own(self) -> bool:
        """Whether each query sees the key at its own position."""
        return False

    @property
    def monotone(self) -> bool:
        """Whether each query sees an interval, and neither of its ends decreases as the query's position grows."""
        return False

    @property
    def reach(self) -> Reach:
        """A set of pairs that contains the mask; a ring leaves out hops beyond it."""
        return Reach()

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

    @property
    @override
    def monotone(self) -> bool:
        return self.a.monotone and self.b.monotone

    @property
    @override
    def reach(self) -> Reach:
        return type(self).combine(self.a.reach, self.b.reach)


class And(_Pair):
    """The intersection of two masks, `a & b`."""

    combine = operator.and_

    @override
    def interval(self, q: Coordinates, natural: bool) -> Interval | None:
        a, b = self.a.interval(q, natural), self.b.interval(q, natural)
        return None if a is None or b is None else a & b

    @property
    @override
    def contains_own(self) -> bool:
        return self.a.contains_own and self.b.contains_own


class Or(_Pair):
    """The union of two masks, `a | b`.

    It is an interval if both have no bound on the same side, or if both contain the query's own position.
    """

    combine = operator.or_

    @override
    def interval(self, q: Coordinates, natural: bool) -> Interval | None:
        a, b = self.a.interval(q, natural), self.b.interval(q, natural)
        if a is None or b is None:
            return None
        open_alike = a.first is b.first is None or a.last is b.last is None
        return a.hull(b) if open_alike or (self.a.contains_own and self.b.contains_own) else None

    @property
    @override
    def contains_own(self) -> bool:
        return self.a.contains_own or self.b.contains_own


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """The complement of a mask, `~a`. It is an interval if `a` is one with a bound on one side only."""

    a: Mask

    @override
    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        return ~self.a.visible(q, kv)

    @override
    def interval(self, q: Coordinates, natural: bool) -> Interval | None:
        a = self.a.interval(q, natural)
        if a is None or (a.first is None) == (a.last is None):
            return None
        return Interval(moved(a.last, 1), None) if a.first is None else Interval(None, moved(a.first, -1))


def all_of(sets: Iterable[Any]) -> Any:
    """The intersection of `sets`, masks or boolean arrays; `None`, meaning every pair, if there are none."""
    found = list(sets)
    return functools.reduce(operator.and_, found) if found else None
