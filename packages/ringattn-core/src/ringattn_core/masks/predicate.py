# SPDX-License-Identifier: Apache-2.0
"""A mask that is a function of the caller's own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import InputError
from .kinds import Coordinates, Mask


@dataclasses.dataclass(frozen=True)
class Predicate(Mask):
    """Where `seen(q_positions, kv_positions)` is true: any function of `jax.numpy` that broadcasts."""

    seen: Callable[[Any, Any], Any]
    bounded = False

    def __post_init__(self) -> None:
        if not callable(self.seen):
            raise InputError(
                "Predicate", f"got {self.seen!r}", "It needs a function (q_positions, kv_positions) -> booleans"
            )

    def __repr__(self) -> str:
        return f"Predicate({getattr(self.seen, '__name__', type(self.seen).__name__)})"

    def visible(self, q: Coordinates, kv: Coordinates) -> Any:
        seen = jnp.asarray(self._called(q.positions, kv.positions))
        if seen.dtype != jnp.bool_:
            raise InputError(repr(self), f"returned {seen.dtype}", "It needs booleans, true where a query sees a key")
        pairs = jnp.broadcast_shapes(q.positions.shape, kv.positions.shape)
        try:
            return jnp.broadcast_to(seen, jnp.broadcast_shapes(seen.shape, pairs))
        except ValueError as error:
            raise InputError(
                repr(self), f"returned shape {seen.shape}", f"It needs what broadcasts with that of the pairs, {pairs}"
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
