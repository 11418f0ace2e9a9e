# SPDX-License-Identifier: Apache-2.0
"""The probabilities of a tile and the gradients of its scores, as every backward kernel computes them."""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from .dropout import kept
from .scores import Part, mask_out, products, scores, to_width

LSE: Final = 0
DELTA: Final = 1
"""The rows of `row_values`: row 0 has the final lse of each query, in units of log2, and row 1 its delta."""


class Derivatives(NamedTuple):
    """`p`: the probabilities after dropout. `ds`, `dproduct`: the gradients of scores and of scaled products."""

    p: jax.Array
    ds: jax.Array
    dproduct: jax.Array


def derivatives(part: Part, row_values: Any, masked: bool) -> Derivatives:
    """The probabilities and gradients of `part`. `masked` says whether to apply the masks.

    `row_values` holds lse and delta as columns if the kernel keeps queries. Else it is `None`: the inputs have them.
    """
    settings = part.settings

    def row(number: int) -> jax.Array:
        if part.by_keys:
            return part.inputs["row_values"][number : number + 1, part.lanes]
        return to_width(row_values[number], part.width)

    # Both products before the scores: with `dp` first, Mosaic schedules 8% more bundles on v6e.
    product, dp = products(part, "q", "k"), products(part, "dout", "v")
    s, bent = scores(part, product * settings.product_scale)
    # Masked before the lse is subtracted: the other way round, libtpu 0.0.48.1 schedules 7% more bundles on v6e.
    weight = jnp.exp2((mask_out(part, s) if masked else s) - row(LSE))
    p = weight
    if settings.rule.dropout_prob:
        keep = kept(part, settings.rule.keep_weight)
        p, dp = weight * keep, dp * keep
    ds = weight * (dp - row(DELTA))
    return Derivatives(p, ds, ds if settings.rule.logits_soft_cap is None else ds * (1.0 - bent * bent))
