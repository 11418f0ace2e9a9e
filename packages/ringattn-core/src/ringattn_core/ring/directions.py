# SPDX-License-Identifier: Apache-2.0
"""Which heads' keys travel which way round the ring, and how what has heads is split between the ways."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from .blocks import Differentiable, Fixed

INPUT_HEADS: Final = {"q": 2, "k": 2, "v": 2, "bias": 1, "slopes": 0}
FIXED_HEADS: Final = {"head_index": 0, "mask": 1}
"""The axis of each array that counts its heads; sinks are no matter of a hop."""


Sum = dict[str, Any]
"""What the hops add to: gradients, under the names of their inputs."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way round, and all that belongs to the heads that go it: `turn` is 1 for onward and -1 for back.

    The first heads go the first way: a key head goes with all query heads that read it.
    """

    turn: int
    inputs: Differentiable
    fixed: Fixed

    def come(self, distance: Any) -> Any:
        """How far onward keys have come, or go, that move so far on this way."""
        return distance if self.turn == 1 else -distance


def split(turns: tuple[int, ...], inputs: Differentiable, fixed: Fixed) -> tuple[Way, ...]:
    """The ways, each with an equal share of the heads."""
    shares = {name: parts(getattr(inputs, name), axis, len(turns)) for name, axis in INPUT_HEADS.items()}
    of_fixed = {name: parts(getattr(fixed, name), axis, len(turns)) for name, axis in FIXED_HEADS.items()}
    return tuple(
        Way(
            turn,
            dataclasses.replace(inputs, **{name: share[number] for name, share in shares.items()}),
            dataclasses.replace(fixed, **{name: share[number] for name, share in of_fixed.items()}),
        )
        for number, turn in enumerate(turns)
    )


def parts(x: Any, axis: int, count: int) -> Sequence[Any]:
    """An array in equal parts along its heads; one that has them all in one entry, or is none, belongs to each."""
    return [x] * count if count == 1 or x is None or x.shape[axis] == 1 else jnp.split(x, count, axis)


def joined(found: Sequence[jax.Array], axis: int) -> jax.Array:
    """The inverse of `parts` for an array that has an entry for every head."""
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis)


def gradient(found: Sequence[Any], x: jax.Array | None, axis: int) -> Any:
    """The gradient of `x` from those of its `parts`: what belongs to each way gets the sum."""
    if x is None or len(found) == 1:
        return found[0]
    return sum(found[1:], found[0]) if x.shape[axis] == 1 else joined(found, axis)


def of_half(sums: Sum, half: int) -> Sum:
    """The sums of the first half of the heads, or of the second; where all heads share one, a fresh one."""

    def take(x: jax.Array | None, axis: int) -> jax.Array | None:
        return jnp.zeros_like(x) if x is not None and x.shape[axis] == 1 else parts(x, axis, 2)[half]

    return {name: take(x, INPUT_HEADS[name]) for name, x in sums.items()}


def with_half(sums: Sum, found: Sum, half: int) -> Sum:
    """The sums with what one half of the heads made of its own."""

    def put(x: jax.Array | None, new: Any, axis: int) -> jax.Array | None:
        if x is None or x.shape[axis] == 1:
            return None if x is None else x + new
        halves = parts(x, axis, 2)
        return joined([new if number == half else halves[number] for number in range(2)], axis)

    return {name: put(x, found[name], INPUT_HEADS[name]) for name, x in sums.items()}
