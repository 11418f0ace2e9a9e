# SPDX-License-Identifier: Apache-2.0
"""Cuts the tokens of a hop into tiles, so that no array has an entry for each query and key of the hop."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from ringattn_core.contract.varying import align, axes_of


class Limits(NamedTuple):
    """How large tiles are."""

    entries: int
    """A tile has at most so many numbers for its queries and keys, or as many as `queries` have."""
    keys: int
    """A tile has about so many keys, unless a block is larger."""
    queries: int
    """A tile has at least so many queries, if there are so many."""


PLAIN: Final = Limits(2**24, 2048, 8)
"""In plain JAX; 64 MiB in float32."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """`count` tiles of `size` consecutive tokens; the last one may end in padding."""

    count: int
    size: int

    @classmethod
    def of(cls, length: int, most: int) -> "Cut":
        """The fewest equal tiles of at most `most` tokens, at least one token, that hold `length` tokens."""
        count = -(-length // max(most, 1))
        return cls(count, -(-length // count))

    def split(self, tree: Any, fill: int = 0) -> Any:
        """The tiles of each array `[B, tokens, ...]`, stacked along a new first axis; padding holds `fill`."""

        def stacked(x: jax.Array) -> jax.Array:
            missing = self.count * self.size - x.shape[1]
            if missing:
                x = jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)
            return jnp.moveaxis(x.reshape(x.shape[0], self.count, self.size, *x.shape[2:]), 1, 0)

        return jax.tree.map(stacked, tree)

    def joined(self, tree: Any, length: int) -> Any:
        """The arrays `[B, length, ...]` whose tiles the tree has: the inverse of `split`."""

        def whole(x: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x, 0, 1)
            return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

        return jax.tree.map(whole, tree)


def cuts(queries: int, blocks: int, size: int, heads: int, kept: int, limits: Limits) -> tuple[Cut, Cut]:
    """The tiles of the queries and of the keys of a hop, these in blocks of `size`; `heads` counts batch rows too.

    `kept` is the number of entries that are kept of each query while its tile meets all keys of the hop.
    """
    of_keys = Cut.of(blocks, limits.keys // size)
    most = limits.entries // max(heads * of_keys.size * size, kept)
    return Cut.of(queries, max(most, limits.queries)), of_keys


def where_any(some: jax.Array | None, compute: Callable[[], Any], otherwise: Any) -> Any:
    """`compute()`; where `some` is false everywhere, the pytree `otherwise`, and nothing is computed.

    `None` stands for true. Under `jax.vmap`, all is computed.
    """
    if some is None:
        return compute()
    return jax.lax.cond(some.any(), compute, lambda: align(otherwise, axes_of(some)))
