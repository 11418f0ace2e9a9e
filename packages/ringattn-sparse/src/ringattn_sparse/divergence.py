# SPDX-License-Identifier: Apache-2.0
"""The sums over keys from which the loss of `teach` follows, and the derivatives of products of index heads."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from .scores import Activation, activated


class Sums(NamedTuple):
    """Sums over keys, for each query and group."""

    largest: Float32[Array, "..."]
    """The largest index score; -inf without a key."""
    indexed: Float32[Array, "..."]
    """`Σ exp(I - largest)`."""
    weight: Float32[Array, "..."]
    """`Z = Σ P`."""
    logarithm: Float32[Array, "..."]
    """`Σ P ln P`."""
    product: Float32[Array, "..."]
    """`Σ P (I - largest)`."""

    @classmethod
    def of_none(cls, zeros: jax.Array) -> "Sums":
        """The sums over no key."""
        return cls(zeros - jnp.inf, zeros, zeros, zeros, zeros)

    @classmethod
    def of(cls, seen: Bool[Array, "... s"], scores: Float32[Array, "... s"], weight: Float32[Array, "... s"]) -> "Sums":
        """The sums over the keys of a tile; the weight is 0 where a pair is not seen."""
        largest = jnp.where(seen, scores, -jnp.inf).max(-1)
        above = scores - jnp.where(largest == -jnp.inf, 0.0, largest)[..., None]
        logarithm = jnp.where(weight > 0, weight * jnp.log(jnp.where(weight > 0, weight, 1.0)), 0.0)
        indexed = jnp.where(seen, jnp.exp(above), 0.0)
        return cls(largest, *(x.sum(-1) for x in (indexed, weight, logarithm, weight * above)))

    def merged(self, new: "Sums") -> "Sums":
        """The sums over the keys of both, which have none in common."""
        largest = jnp.maximum(self.largest, new.largest)
        finite = jnp.where(largest == -jnp.inf, 0.0, largest)

        def product(x: Sums) -> jax.Array:
            return x.product + x.weight * (jnp.where(x.largest == -jnp.inf, 0.0, x.largest) - finite)

        return Sums(
            largest,
            self.indexed * jnp.exp(self.largest - finite) + new.indexed * jnp.exp(new.largest - finite),
            self.weight + new.weight,
            self.logarithm + new.logarithm,
            product(self) + product(new),
        )

    @property
    def index_lse(self) -> Float32[Array, "..."]:
        """`ln Σ exp(I)`; 0 for a query that sees no key."""
        return jnp.where(self.indexed == 0, 0.0, self.largest + jnp.log(self.indexed))

    @property
    def divergences(self) -> Float32[Array, "..."]:
        """The loss of each query and group; 0 where no key has a weight."""
        some = self.weight != 0
        weight, indexed = (jnp.where(some, x, 1.0) for x in (self.weight, self.indexed))
        found = (self.logarithm - self.product) / weight - jnp.log(weight) + jnp.log(indexed)
        return jnp.where(some, found, 0.0)


def dscores_of(
    seen: Bool[Array, "... t s"],
    scores: Float32[Array, "... t s"],
    weight: Float32[Array, "... t s"],
    index_lse: Float32[Array, "... t"],
    total: Float32[Array, "... t"],
) -> Float32[Array, "... t s"]:
    """The gradients of the losses by the index scores of a tile; 0 where a pair is not seen."""
    some, index_lse, total = seen & (total != 0)[..., None], index_lse[..., None], total[..., None]
    return jnp.where(some, jnp.exp(scores - index_lse) - weight / jnp.where(total != 0, total, 1.0), 0.0)


def dproducts_of(
    activation: Activation,
    products: Float32[Array, "... t s"],
    dscores: Float32[Array, "... t s"],
    weights: Float32[Array, "... t"] | None,
    dtype: Any,
) -> tuple[Float[Array, "... t s"], Float32[Array, "... t"]]:
    """The gradients by the products of index heads, and by their weights.

    Those by the products are multiplied by arrays of `dtype`, and have it, unless it is float16.
    """
    active, pull = jax.vjp(functools.partial(activated, activation), products)
    (dproducts,) = pull(dscores if weights is None else dscores * weights[..., None])
    if dtype != jnp.float16:  # many are below its smallest number, 6e-8
        dproducts = dproducts.astype(dtype)
    return dproducts, (dscores * active).sum(-1)
