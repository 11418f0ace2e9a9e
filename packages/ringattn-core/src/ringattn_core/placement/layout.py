# SPDX-License-Identifier: Apache-2.0
"""The layouts: which tokens of the whole sequence each rank holds, and in which order."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from ..errors import InputError

LAYOUTS: Final = ("contiguous", "zigzag", "striped")
ALIASES: Final = {"dual_chunk_swap": "zigzag"}
MOST_CONSTANT: Final = 2**16
"""Up to this many tokens, the indices of the only shard are a constant of the program. XLA then computes what depends
on nothing else, such as the bounds of windows, when it compiles: a kernel or two less before each attention kernel."""


def canonical(layout: Any) -> str:
    """The canonical name of a layout; raises for an unknown one."""
    name = ALIASES.get(layout, layout) if isinstance(layout, str) else None
    if name not in LAYOUTS:
        known = ", ".join(repr(n) for n in (*LAYOUTS, *ALIASES))
        raise InputError("layout", f"got {layout!r}", f"Known layouts: {known}")
    return name


def pieces(layout: str) -> int:
    """The number of equal chunks that a shard is made of, which must divide its length: 2 for "zigzag", else 1."""
    return 2 if layout == "zigzag" else 1


def refuse_indivisible(argument: str, length: int, layout: str, ranks: int, said_by: str = "layout") -> None:
    """Raises if a layout, which the argument `said_by` names, cannot split a sequence of this length equally."""
    parts = ranks * pieces(layout)
    if length % parts:
        raise InputError(
            said_by,
            f"{layout!r} on {ranks} ranks needs lengths that {parts} divides, but {argument} has {length}",
            f"Pad it to {-(-length // parts) * parts}",
        )


def of_neighbours(x: jax.Array, layout: str, shards: int, axis: int) -> jax.Array:
    """Merges the shards of `shards` neighbouring ranks, which `x` holds one after another, into one ordered shard.

    The result is a shard of the same layout on fewer ranks; in the striped layout, its stripes are `shards` times
    wider. If `shards` is the number of all ranks, the result is the whole sequence in natural order.
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
    """Splits an ordered shard into those of `shards` neighbouring ranks again: the inverse of `of_neighbours`."""
    if layout == "contiguous" or shards == 1:
        return x
    before, after, length = x.shape[:axis], x.shape[axis + 1 :], x.shape[axis] // shards
    if layout == "striped":
        return jnp.swapaxes(x.reshape(*before, length, shards, *after), axis, axis + 1).reshape(x.shape)
    first, second = (half.reshape(*before, shards, -1, *after) for half in jnp.split(x, 2, axis))
    return jnp.concatenate([first, jnp.flip(second, axis)], axis + 1).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Shards:
    """How a sequence is cut into `count` shards, one for each rank; ranks may be traced.

    In the striped layout, ranks take turns at runs of `stripe` consecutive tokens. The shards of `stripe` neighbouring
    ranks with runs of one token form one such shard (`of_neighbours`).

    In the zigzag layout, a rank holds a chunk and its mirror image: rank `r` the chunk `r`, or if `folded` (`balance`)
    chunk `2r`, which it holds in contiguous order too.
    """

    layout: str
    count: int
    stripe: int = 1
    folded: bool = False

    def indices(self, rank: Any, length: int) -> Int32[Array, " length"]:
        """The global index of each of the `length` tokens of `rank`; increasing in every layout.

        The indices of all ranks together are a permutation of `range(count * length)`.
        """
        if self.count == 1 and length <= MOST_CONSTANT:
            return jnp.asarray(np.arange(length, dtype=np.int32))
        return self._indices(rank, jnp.arange(length, dtype=jnp.int32), jnp.where)

    def order(self, length: int) -> np.ndarray:
        """The global index of each token of a sequence of this length, in layout order: rank by rank."""
        steps = np.arange(length // self.count, dtype=np.int32)
        return self._indices(np.arange(self.count, dtype=np.int32)[:, None], steps, np.where).reshape(-1)

    def place_of(self, index: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """The rank that holds the token with this global index, and the token's number in that rank's shard.

        The inverse of `indices`, for shards of `length` tokens that are neither `folded` nor striped in longer runs.
        """
        if self.layout == "striped":
            return index % self.count, index // self.count
        run = length // pieces(self.layout)
        chunk, entry = index // run, index % run
        second = chunk >= self.count  # in zigzag order, a run of the back half: the second of its rank
        return jnp.where(second, 2 * self.count - 1 - chunk, chunk), entry + jnp.where(second, run, 0)

    def before(self, index: Int32[Array, "*queries"], rank: Any, length: int) -> Int32[Array, "*queries"]:
        """How many of the `length` tokens of `rank` have a global index below `index`, which is any int32."""
        index = index.clip(0, self.count * length)
        if self.layout == "zigzag":
            half = length // 2
            first, second = ((index - chunk * half).clip(0, half) for chunk in self._chunks(rank))
            return first + second
        run = self.stripe if self.layout == "striped" else length
        turns, rest = index // (self.count * run), index % (self.count * run)
        return turns * run + (rest - rank * run).clip(0, run)

    def columns(self, x: jax.Array, rank: Any) -> jax.Array:
        """Entries of `x` for the tokens of `rank`, in the rank's order; the last axis of `x` is in natural order."""
        length = x.shape[-1] // self.count
        if self.layout == "striped":
            grid = x.reshape(*x.shape[:-1], length // self.stripe, self.count, self.stripe)
            return jax.lax.dynamic_index_in_dim(grid, rank, x.ndim, keepdims=False).reshape(*x.shape[:-1], length)
        chunks = self._chunks(rank)
        size = length // len(chunks)
        return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x, chunk * size, size, -1) for chunk in chunks], -1)

    def put_columns(self, whole: jax.Array, part: jax.Array, rank: Any, start: int = 0) -> jax.Array:
        """Overwrites the columns of `rank` in `whole`: `part` from the shard's entry `start` on, and 0 in its others.

        The zeros overwrite nothing in a ring: no other hop computes with the keys of this rank.
        """
        length = whole.shape[-1] // self.count
        if length > part.shape[-1]:
            others = (start, length - start - part.shape[-1])
            part = jnp.pad(part, (*[(0, 0)] * (part.ndim - 1), others))
        if self.layout == "striped":
            grid = whole.reshape(*whole.shape[:-1], length // self.stripe, self.count, self.stripe)
            part = part.reshape(*part.shape[:-1], length // self.stripe, self.stripe)
            return jax.lax.dynamic_update_index_in_dim(grid, part, rank, whole.ndim).reshape(whole.shape)
        chunks = self._chunks(rank)
        for chunk, piece in zip(chunks, jnp.split(part, len(chunks), -1), strict=True):
            whole = jax.lax.dynamic_update_slice_in_dim(whole, piece, chunk * piece.shape[-1], -1)
        return whole

    def _chunks(self, rank: Any) -> tuple[Any, ...]:
        """The numbers of the equal chunks of the sequence that `rank` holds, unless the layout is striped."""
        if self.layout != "zigzag":
            return (rank,)
        last = 2 * self.count - 1
        first = (last - abs(last - 4 * rank)) // 2 if self.folded else rank  # the smaller of 2r and last - 2r
        return first, last - first

    def _indices(self, rank: Any, step: Any, where: Any) -> Any:
        """The global index of each `step`, a token's number in the shard of `rank`; `where` is NumPy's or JAX's."""
        if self.layout == "contiguous":
            return rank * step.size + step
        if self.layout == "striped":
            return (step // self.stripe * self.count + rank) * self.stripe + step % self.stripe
        half = step.size // 2
        first, second = (chunk * half for chunk in self._chunks(rank))
        return where(step < half, first + step, second + step - half)
