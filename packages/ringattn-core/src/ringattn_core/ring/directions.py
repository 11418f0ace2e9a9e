# SPDX-License-Identifier: Apache-2.0
"""Which heads' keys travel in which direction round the ring, and how arrays are split between the directions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..placement import arrays
from .blocks import Differentiable, Fixed

INPUT_HEADS, FIXED_HEADS = (arrays.axes_with(kind, "N", "n", "K") for kind in (Differentiable, Fixed))
"""The axis of each array that counts its heads."""
Sum = dict[str, Any]
"""The gradients summed over the hops so far, under the names of their inputs."""


@dataclasses.dataclass(frozen=True)
class Direction:
    """One direction round the ring with the share of the heads that travel in it: `sign` is 1 for onward, -1 for back.

    A key head travels with all query heads that read it; the first heads go in the first direction.
    """

    sign: int
    inputs: Differentiable
    fixed: Fixed

    def signed(self, distance: Any) -> Any:
        """`distance` with the sign of this direction round the ring."""
        return distance if self.sign == 1 else -distance


def split(signs: tuple[int, ...], inputs: Differentiable, fixed: Fixed) -> tuple[Direction, ...]:
    """The directions, each with an equal share of the heads."""
    shares = {name: parts(getattr(inputs, name), axis, len(signs)) for name, axis in INPUT_HEADS.items()}
    of_fixed = {name: parts(getattr(fixed, name), axis, len(signs)) for name, axis in FIXED_HEADS.items()}
    return tuple(
        Direction(
            sign,
            dataclasses.replace(inputs, **{name: share[number] for name, share in shares.items()}),
            dataclasses.replace(fixed, **{name: share[number] for name, share in of_fixed.items()}),
        )
        for number, sign in enumerate(signs)
    )


def parts(x: Any, axis: int, count: int) -> Sequence[Any]:
    """An array in equal parts along its heads; one that all heads share, or `None`, belongs to every part."""
    return [x] * count if count == 1 or x is None or x.shape[axis] == 1 else jnp.split(x, count, axis)


def joined(found: Sequence[jax.Array], axis: int) -> jax.Array:
    """The inverse of `parts` for an array that has an entry for every head."""
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis)


def gradient(found: Sequence[Any], x: jax.Array | None, axis: int) -> Any:
    """The gradient of `x` from the gradients of its `parts`: summed where all heads share it."""
    if x is None or len(found) == 1:
        return found[0]
    return sum(found[1:], found[0]) if x.shape[axis] == 1 else joined(found, axis)


def of_half(sums: Sum, half: int) -> Sum:
    """The sums of one half of the heads; where all heads share an array, zeros."""

    def take(x: jax.Array | None, axis: int) -> jax.Array | None:
        return jnp.zeros_like(x) if x is not None and x.shape[axis] == 1 else parts(x, axis, 2)[half]

    return {name: take(x, INPUT_HEADS[name]) for name, x in sums.items()}


def with_half(sums: Sum, found: Sum, half: int) -> Sum:
    """The sums with those of one half of the heads replaced, or added where all heads share an array."""

    def put(x: jax.Array | None, new: Any, axis: int) -> jax.Array | None:
        if x is None or x.shape[axis] == 1:
            return None if x is None else x + new
        halves = parts(x, axis, 2)
        return joined([new if number == half else halves[number] for number in range(2)], axis)

    return {name: put(x, found[name], INPUT_HEADS[name]) for name, x in sums.items()}
