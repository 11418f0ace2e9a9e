# SPDX-License-Identifier: Apache-2.0
"""Cuts the tokens of a hop into tiles, so that no array has an entry for each query and key of the hop."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from ringattn_core.contract.varying import align, axes_of

MOST_PRODUCTS: Final = 2**24
"""A tile has at most so many products of a head's query and a key, or as many as 8 queries have: 64 MiB in float32."""
KEYS: Final = 2048
"""A tile has about so many keys, unless a block is larger."""


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


def cuts(
    queries: int, blocks: int, size: int, heads: int, kept: int, limits: tuple[int, int] | None = None
) -> tuple[Cut, Cut]:
    """The tiles of the queries and of the keys of a hop, these in blocks of `size`; `heads` counts batch rows too.

    `kept` is the number of entries that are kept of each query while its tile meets all keys of the hop. `limits` takes
    the place of `MOST_PRODUCTS` and `KEYS`.
    """
    most, keys = limits or (MOST_PRODUCTS, KEYS)
    of_keys = Cut.of(blocks, keys // size)
    return Cut.of(queries, max(most // max(heads * of_keys.size * size, kept), 8)), of_keys


def where_any(some: jax.Array | None, compute: Callable[[], Any], otherwise: Any) -> Any:
    """`compute()`; where `some` is false everywhere, the pytree `otherwise`, and nothing is computed.

    `None` stands for true. Under `jax.vmap`, all is computed.
    """
    if some is None:
        return compute()
    return jax.lax.cond(some.any(), compute, lambda: align(otherwise, axes_of(some)))
