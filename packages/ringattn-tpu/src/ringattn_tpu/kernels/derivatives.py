# SPDX-License-Identifier: Apache-2.0
"""What one tile of scores adds to the gradients, in every backward kernel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .scores import HIDDEN, Part, bent, kept, outer, scored, selected, to_column, visible, wide

LSE, DELTA = 0, 1
"""The rows of `state`, that come with each query: the final lse in units of log2, and delta."""


class Derivatives(NamedTuple):
    """`p` as it met the values, `ds` the gradient of each score, `dproduct` that of each product over the scale."""

    p: jax.Array
    ds: jax.Array
    dproduct: jax.Array


def keep_state(inputs: Any, state: Any) -> None:
    """The state of the own queries, turned to columns once for all keys that visit them."""
    for row in (LSE, DELTA):
        state[row] = to_column(inputs["state"][row : row + 1, :])


def derivatives(part: Part, state: Any, masked: bool) -> Derivatives:
    """Of a part; `state` holds the queries' columns, where the queries are a kernel's own side."""
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
    # Selected last, everywhere: the lse of a row that saw something not finite is NaN, and what a pair holds that does
    # not see each other may be so large that its products are infinite.
    seen = visible(part) if masked else None
    p = jnp.exp2(selected(seen, scored(part, bend) - row(LSE), HIDDEN))
    weights = kept(part, facts.keep_weight) if facts.dropout else None
    ds = p * ((dp if weights is None else dp * weights) - row(DELTA))
    dproduct = ds * (1.0 - bend * bend) if facts.capped else ds
    return Derivatives(
        p=p if weights is None else p * weights, ds=selected(seen, ds, 0.0), dproduct=selected(seen, dproduct, 0.0)
    )
