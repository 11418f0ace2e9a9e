# SPDX-License-Identifier: Apache-2.0
"""How partial results combine."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float32

from .protocol import Block, Partial


def empty(block: Block) -> Partial:
    """The identity of `merge`: no key seen yet."""
    batch, length, heads = block.q.shape[:3]
    out = jnp.zeros((batch, length, heads, block.value_dim), jnp.float32)
    return Partial(out, jnp.full((batch, heads, length), -jnp.inf, jnp.float32))


def merge(a: Partial, b: Partial) -> Partial:
    """Both sets of keys at once. Associative and commutative up to rounding; `empty` is the identity."""
    lse = logaddexp(a.lse, b.lse)
    return Partial(a.out * weight(a.lse, lse) + b.out * weight(b.lse, lse), lse)


def with_sinks(partial: Partial, sinks: Float32[Array, "N n"] | None) -> Partial:
    """The sinks enter the denominator, once: they have weight but no value."""
    if sinks is None:
        return partial
    largest = jnp.max(sinks, axis=-1)
    safe = jnp.where(jnp.isneginf(largest), 0.0, largest)
    total = safe + jnp.log(jnp.sum(jnp.exp(sinks - safe[:, None]), axis=-1))
    lse = logaddexp(partial.lse, total[None, :, None])
    return Partial(partial.out * weight(partial.lse, lse), lse)


def weight(part: Float32[Array, "B N T"], whole: Float32[Array, "B N T"]) -> Float32[Array, "B T N 1"]:
    """The share of `part` in `whole`, laid out to scale an `out`; 0 where there is no part."""
    share = jnp.where(jnp.isneginf(part), 0.0, jnp.exp(part - jnp.where(jnp.isneginf(whole), 0.0, whole)))
    return jnp.swapaxes(share, 1, 2)[..., None]


def logaddexp(a: Float32[Array, "*x"], b: Float32[Array, "*x"]) -> Float32[Array, "*x"]:
    """`ln(e^a + e^b)`; `-inf` is the identity, NaN absorbs."""
    largest = jnp.maximum(a, b)
    safe = jnp.where(jnp.isneginf(largest), 0.0, largest)
    return safe + jnp.log(jnp.exp(a - safe) + jnp.exp(b - safe))


def merging(forward: Callable[[Block], Partial]) -> Callable[[Block, Partial], Partial]:
    """A kernel that only computes its own block becomes one that continues from a partial result."""

    def continued(block: Block, partial: Partial) -> Partial:
        return merge(partial, forward(block))

    return continued
