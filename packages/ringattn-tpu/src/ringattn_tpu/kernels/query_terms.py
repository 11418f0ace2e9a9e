# SPDX-License-Identifier: Apache-2.0
"""Queries times the scale of the scores, as two bfloat16 terms side by side: a wide matrix unit adds up both for free.

A matrix unit of 256 x 256 takes as long for rows of 128, or of fewer numbers, as for rows of 256. So the product of
`[high, low]` with `[k, k]` costs no more than that of `q` with `k`, and leaves the vector unit one multiplication less
for every score.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..block_sizes import LANES
from .scores import Part, products


def keep_terms(q: jax.Array, scale: float, terms: Any) -> None:
    """Stores in `terms [tile, 256]` the numbers `q * scale`, rounded, and beside them what the rounding left out.

    The sum of both has the 16 leading bits of `q * scale`. Each has 128 lanes, with zeros behind a shorter head.
    """
    scaled = q.astype(jnp.float32) * scale
    high = scaled.astype(terms.dtype)
    low = (scaled - high.astype(jnp.float32)).astype(terms.dtype)
    terms[...] = _side_by_side(high, low)


def scaled_products(part: Part, terms: Any) -> jax.Array:
    """The products of queries and keys, times `product_scale`; `terms` is `None` if the kernel does not keep any."""
    if terms is None:
        return products(part, "q", "k") * part.settings.product_scale
    k = part.rows("k")
    return jax.lax.dot_general(
        terms[...], _side_by_side(k, k), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _side_by_side(a: jax.Array, b: jax.Array) -> jax.Array:
    """`[a, b]`, each padded to whole registers: without that, Mosaic would shift `b` along the lanes."""
    more = ((0, 0), (0, LANES - a.shape[1]))
    return jnp.concatenate([jnp.pad(a, more), jnp.pad(b, more)], 1)
