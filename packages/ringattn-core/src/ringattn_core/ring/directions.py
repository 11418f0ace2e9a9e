# SPDX-License-Identifier: Apache-2.0
"""Which heads' keys travel in which direction round the ring, and how arrays are split between the directions."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..contract.call import IN_BLOCK, Call
from ..contract.protocol import Block
from ..placement.arrays import axes_with

CALL_HEADS: Final = axes_with(Call, "N", "n", "K")
"""The number of the head axis of each array of a call that has one."""
BLOCK_HEADS: Final = axes_with(Block, "N", "n")
"""The number of the axis of query heads of each array of a block that has one."""
CALL_NAMES: Final = {in_block: name for name, in_block in IN_BLOCK.items()}
"""The name in a call of each array of a block."""
Sum = dict[str, jax.Array]
"""Gradients summed over the hops so far, under the names of the arrays in a `Block`; no "q" before the first kernel."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Location:
    """Which part of the whole call a rank has: its number on the ring, and the indices of its batch rows and heads.

    These are inputs, because the backward pass cannot compute them: the axis name of a `vmap` is bound in the forward
    pass only.
    """

    rank: Int32[Array, ""]
    batch_index: Int32[Array, " B"]
    head_index: Int32[Array, " N"]


@dataclasses.dataclass(frozen=True)
class Direction:
    """One direction round the ring, and the arrays of the heads whose keys travel that way.

    `sign` is 1 if keys go from rank r to rank r + 1, and -1 if they go to rank r - 1. A key head and all query heads
    that read it have the same direction. The ids and positions of keys in `call` are those of all ranks.
    """

    sign: int
    call: Call
    location: Location


def split(signs: tuple[int, ...], call: Call, location: Location) -> tuple[Direction, ...]:
    """Splits the heads evenly between the directions; the first direction gets the first heads."""
    shares = {name: parts(getattr(call, name), axis, len(signs)) for name, axis in CALL_HEADS.items()}
    heads = parts(location.head_index, 0, len(signs))
    return tuple(
        Direction(
            sign,
            dataclasses.replace(call, **{name: share[number] for name, share in shares.items()}),
            dataclasses.replace(location, head_index=heads[number]),
        )
        for number, sign in enumerate(signs)
    )


def parts(x: Any, axis: int, count: int) -> Sequence[Any]:
    """Splits an array along its head axis into equal parts. `None`, or an array that all heads share, is repeated."""
    return [x] * count if count == 1 or x is None or x.shape[axis] == 1 else jnp.split(x, count, axis)


def joined(found: Sequence[jax.Array], axis: int) -> jax.Array:
    """The inverse of `parts` for an array that has an entry for every head."""
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis)


def joined_sums(sums: Sequence[Sum], call: Call) -> Sum:
    """Joins the sums of all directions along the heads. Sums for an array that all heads share are added."""

    def whole(name: str, found: list[jax.Array]) -> jax.Array:
        x = getattr(call, CALL_NAMES[name])
        shared = x.shape[CALL_HEADS[CALL_NAMES[name]]] == 1
        return sum(found[1:], found[0]) if shared else joined(found, BLOCK_HEADS[name])

    return {name: whole(name, [each[name] for each in sums]) for name in sums[0]}


def halved(sums: Sum) -> list[Sum]:
    """The inverse of `joined_sums` for two directions. Of a sum that all heads share, the second half is zeros."""

    def two(x: jax.Array, axis: int) -> Sequence[jax.Array]:
        return (x, jnp.zeros_like(x)) if x.shape[axis] == 1 else parts(x, axis, 2)

    return [{name: two(x, BLOCK_HEADS[name])[half] for name, x in sums.items()} for half in range(2)]
