# SPDX-License-Identifier: Apache-2.0
"""How partial results combine."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float32

from .protocol import Block, Partial


def empty(block: Block, dtype: Any = jnp.float32, rest: bool = False) -> Partial:
    """The identity of `merge`: no key seen yet. Another dtype of `out` than float32 is for a kernel that `finishes`."""
    batch, length, heads = block.q.shape[:3]
    out = jnp.zeros((batch, length, heads, block.value_dim), dtype)
    lse = jnp.full((batch, heads, length), -jnp.inf, jnp.float32)
    return Partial(out, lse, empty=True, rest=jnp.zeros_like(out) if rest else None)


def merge(a: Partial, b: Partial) -> Partial:
    """Both sets of keys at once. Associative and commutative up to rounding; `empty` is the identity."""
    lse, share_a, share_b = combined(a.lse, b.lse)
    return Partial(a.out * _over_out(share_a) + b.out * _over_out(share_b), lse)


def with_sinks(partial: Partial, sinks: Float32[Array, "N n"] | None) -> Partial:
    """The sinks enter the denominator, once: they have weight but no value."""
    if sinks is None:
        return partial
    lse, share = lse_with_sinks(partial.lse, sinks)
    return Partial(partial.out * _over_out(share), lse)


def lse_with_sinks(
    lse: Float32[Array, "B N T"], sinks: Float32[Array, "N n"]
) -> tuple[Float32[Array, "B N T"], Float32[Array, "B N T"]]:
    """The lse with the sinks in it, and the share that the keys have of it."""
    largest = jnp.max(sinks, axis=-1)
    safe = jnp.where(jnp.isneginf(largest), 0.0, largest)
    total = safe + jnp.log(jnp.sum(jnp.exp(sinks - safe[:, None]), axis=-1))
    return combined(lse, total[None, :, None])[:2]


def combined(
    a: Float32[Array, "*#x"], b: Float32[Array, "*#x"]
) -> tuple[Float32[Array, "*x"], Float32[Array, "*x"], Float32[Array, "*x"]]:
    """`ln(e^a + e^b)`, and the shares of `a` and `b` in it. `-inf` is the identity, with a share of 0; NaN absorbs."""
    largest = jnp.maximum(a, b)
    safe = jnp.where(jnp.isneginf(largest), 0.0, largest)
    weight_a, weight_b = jnp.exp(a - safe), jnp.exp(b - safe)
    total = weight_a + weight_b
    # Not exp(a - lse): at 1e4 the lse is rounded to 1e-3, and the shares would no longer add up to 1.
    divisor = jnp.where(total == 0, 1.0, total)
    return safe + jnp.log(total), weight_a / divisor, weight_b / divisor


def _over_out(share: Float32[Array, "B N T"]) -> Float32[Array, "B T N 1"]:
    return jnp.swapaxes(share, 1, 2)[..., None]


def merging(forward: Callable[[Block], Partial]) -> Callable[[Block, Partial], Partial]:
    """A kernel that only computes its own block becomes one that continues from a partial result."""

    def continued(block: Block, partial: Partial) -> Partial:
        return merge(partial, forward(block))

    return continued
