# SPDX-License-Identifier: Apache-2.0
"""Which tokens of the whole sequence each rank holds, and in which order."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from ..errors import InputError

LAYOUTS: Final = ("contiguous", "zigzag", "striped")
ALIASES: Final = {"dual_chunk_swap": "zigzag"}


def canonical(layout: Any) -> str:
    """The canonical name of a layout; raises for an unknown one."""
    name = ALIASES.get(layout, layout) if isinstance(layout, str) else None
    if name not in LAYOUTS:
        known = ", ".join(repr(n) for n in (*LAYOUTS, *ALIASES))
        raise InputError("layout", f"got {layout!r}", f"Known layouts: {known}")
    return name


def pieces(layout: str) -> int:
    """The number of equal parts into which the length of a shard must divide."""
    return 2 if layout == "zigzag" else 1


def refuse_indivisible(argument: str, length: int, layout: str, ranks: int) -> None:
    """Raises if a layout cannot split a sequence of this length into equal shards."""
    parts = ranks * pieces(layout)
    if length % parts:
        raise InputError(
            "layout",
            f"{layout!r} on {ranks} ranks needs lengths that {parts} divides, but {argument} has {length}",
            f"Pad it to {-(-length // parts) * parts}",
        )


def indices(layout: str, ranks: int, rank: Any, length: int, stripe: int = 1) -> Int32[Array, " length"]:
    """The global index of each of the `length` tokens that `rank` holds; increasing in every layout.

    `rank` may be traced. The indices of all ranks together are a permutation of `range(ranks * length)`. In the striped
    layout, ranks take turns at runs of `stripe` consecutive tokens. The shards of `stripe` neighbouring ranks with runs
    of one token form one such shard (`of_neighbours`).
    """
    return _indices(layout, ranks, rank, jnp.arange(length, dtype=jnp.int32), stripe, jnp.where)


def order(layout: str, ranks: int, length: int, stripe: int = 1) -> np.ndarray:
    """The global index of each token of the whole sequence, in layout order: rank by rank."""
    every_rank, step = np.arange(ranks, dtype=np.int32)[:, None], np.arange(length // ranks, dtype=np.int32)
    return _indices(canonical(layout), ranks, every_rank, step, stripe, np.where).reshape(-1)


def _indices(layout: str, ranks: int, rank: Any, step: Any, stripe: int, where: Any) -> Any:
    """The global index of each `step`, a number of a token in the shard of `rank`. `where` is that of NumPy or JAX."""
    if layout == "contiguous":
        return rank * step.size + step
    if layout == "striped":
        return (step // stripe * ranks + rank) * stripe + step % stripe
    half = step.size // 2
    return where(step < half, rank * half + step, (2 * ranks - 1 - rank) * half + step - half)


def of_neighbours(x: jax.Array, layout: str, shards: int, axis: int) -> jax.Array:
    """Merges the shards of `shards` neighbouring ranks, which `x` holds one after another, into one ordered shard.

    The result is a shard of the same layout on fewer ranks; in the striped layout, its stripes are `shards` times
    wider. The merged shards of all ranks are the whole sequence in natural order.
    """
    if layout == "contiguous" or shards == 1:
        return x
    before, after, length = x.shape[:axis], x.shape[axis + 1 :], x.shape[axis] // shards
    if layout == "striped":
        return jnp.swapaxes(x.reshape(*before, shards, length, *after), axis, axis + 1).reshape(x.shape)
    first, second = jnp.split(x.reshape(*before, shards, length, *after), 2, axis + 1)
    halves = (half.reshape(*before, -1, *after) for half in (first, jnp.flip(second, axis)))
    return jnp.concatenate(list(halves), axis)


def to_neighbours(x: jax.Array, layout: str, shards: int, axis: int) -> jax.Array:
    """The inverse of `of_neighbours`."""
    if layout == "contiguous" or shards == 1:
        return x
    before, after, length = x.shape[:axis], x.shape[axis + 1 :], x.shape[axis] // shards
    if layout == "striped":
        return jnp.swapaxes(x.reshape(*before, length, shards, *after), axis, axis + 1).reshape(x.shape)
    first, second = (half.reshape(*before, shards, -1, *after) for half in jnp.split(x, 2, axis))
    return jnp.concatenate([first, jnp.flip(second, axis)], axis + 1).reshape(x.shape)


def columns(x: jax.Array, layout: str, ranks: int, rank: Any, stripe: int = 1) -> jax.Array:
    """The entries of `rank`'s tokens, in its order, from a last axis over the whole sequence in natural order."""
    length = x.shape[-1] // ranks
    if layout == "contiguous":
        return jax.lax.dynamic_slice_in_dim(x, rank * length, length, -1)
    if layout == "striped":
        grid = x.reshape(*x.shape[:-1], length // stripe, ranks, stripe)
        return jax.lax.dynamic_index_in_dim(grid, rank, x.ndim, keepdims=False).reshape(*x.shape[:-1], length)
    half = length // 2
    first = jax.lax.dynamic_slice_in_dim(x, rank * half, half, -1)
    second = jax.lax.dynamic_slice_in_dim(x, (2 * ranks - 1 - rank) * half, half, -1)
    return jnp.concatenate([first, second], -1)


def put_columns(whole: jax.Array, part: jax.Array, layout: str, ranks: int, rank: Any, stripe: int = 1) -> jax.Array:
    """`whole` with `columns(whole, ...)` replaced by `part`."""
    length = part.shape[-1]
    if layout == "contiguous":
        return jax.lax.dynamic_update_slice_in_dim(whole, part, rank * length, -1)
    if layout == "striped":
        grid = whole.reshape(*whole.shape[:-1], length // stripe, ranks, stripe)
        part = part.reshape(*part.shape[:-1], length // stripe, stripe)
        return jax.lax.dynamic_update_index_in_dim(grid, part, rank, whole.ndim).reshape(whole.shape)
    half = length // 2
    whole = jax.lax.dynamic_update_slice_in_dim(whole, part[..., :half], rank * half, -1)
    return jax.lax.dynamic_update_slice_in_dim(whole, part[..., half:], (2 * ranks - 1 - rank) * half, -1)


@dataclasses.dataclass(frozen=True)
class Shards:
    """How a sequence is cut into `count` shards; in the striped layout, a shard has runs of `stripe` tokens."""

    layout: str
    count: int
    stripe: int = 1

    def indices(self, rank: Any, length: int) -> Int32[Array, " length"]:
        """`indices` of the shard of `rank`."""
        return indices(self.layout, self.count, rank, length, self.stripe)

    def order(self, length: int) -> np.ndarray:
        """`order` of a sequence of this length."""
        return order(self.layout, self.count, length, self.stripe)

    def columns(self, x: jax.Array, rank: Any) -> jax.Array:
        """`columns` of the shard of `rank`."""
        return columns(x, self.layout, self.count, rank, self.stripe)

    def put_columns(self, whole: jax.Array, part: jax.Array, rank: Any) -> jax.Array:
        """`put_columns` of the shard of `rank`."""
        return put_columns(whole, part, self.layout, self.count, rank, self.stripe)
