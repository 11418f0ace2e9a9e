# SPDX-License-Identifier: Apache-2.0
"""What one tile of scores adds to the gradients, in every backward kernel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .scores import HIDDEN, Part, bent, kept, outer, scored, selected, to_column, visible, wide

LSE, DELTA = 0, 1
"""The rows of `state`, that come with each query: the final lse in units of log2, and delta."""


class Derivatives(NamedTuple):
    """The `weight` of each pair, and `p`, what met the values; `ds` the gradient of each score, `dproduct` that of each
    product over the scale.

    Weights are zero where a pair does not see each other. What such a pair holds may be so large that its products are
    infinite: its gradients count for nothing only after `of_seen` or `of_weighed`.
    """

    weight: jax.Array
    p: jax.Array
    ds: jax.Array
    dproduct: jax.Array
    seen: jax.Array | None

    def of_seen(self, x: jax.Array) -> jax.Array:
        """Zero where a pair does not see each other."""
        return selected(self.seen, x, 0.0)

    def of_weighed(self, x: jax.Array) -> jax.Array:
        """The same, told by the weight in the dtype of `x`, which takes less memory than what is visible."""
        if self.seen is None:
            return x
        return jnp.where(self.weight.astype(x.dtype) == 0.0, jnp.zeros((), x.dtype), x)


def keep_state(inputs: Any, state: Any) -> None:
    """The state of the own queries, turned to columns once for all keys that visit them."""
    for row in (LSE, DELTA):
        state[row] = to_column(inputs["state"][row : row + 1, :])


def derivatives(part: Part, state: Any, masked: bool, by_weight: bool = False) -> Derivatives:
    """Of a part; `state` holds the queries' columns, where the queries are a kernel's own side.

    `by_weight` has scores hidden before the exponential and not after it: shorter where `of_weighed` follows.
    """
    inputs, facts = part.inputs, part.facts

    def row(number: int) -> jax.Array:
        if part.by_keys:
            return inputs["state"][number : number + 1, part.lanes]
        return wide(state[number], part.width)

    q_rows = part.lanes if part.by_keys else slice(None)
    kv_rows = slice(None) if part.by_keys else part.lanes
    q, dout, k, v = inputs["q"][q_rows, :], inputs["dout"][q_rows, :], inputs["k"][kv_rows, :], inputs["v"][kv_rows, :]
    product, dp = ((outer(k, q, facts), outer(v, dout, facts)) if part.by_keys else
                   (outer(q, k, facts), outer(dout, v, facts)))  # fmt: skip
    bend = bent(part, product)
    seen = visible(part) if masked else None
    # Selected after the difference: the lse of a row that saw something not finite is NaN.
    exponent = scored(part, bend) - row(LSE)
    raw = jnp.exp2(selected(seen, exponent, HIDDEN) if by_weight else exponent)
    weight = raw if by_weight else selected(seen, raw, 0.0)
    weights = kept(part, facts.keep_weight) if facts.dropout else None
    ds = raw * ((dp if weights is None else dp * weights) - row(DELTA))
    return Derivatives(
        weight=weight,
        p=weight if weights is None else weight * weights,
        ds=ds,
        dproduct=ds * (1.0 - bend * bend) if facts.capped else ds,
        seen=seen,
    )
