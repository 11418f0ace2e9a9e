# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""What one tile is in every backward kernel: its probabilities from the final lse, and the derivative by its scores."""

import triton
import triton.language as tl

from .orientation import as_queries
from .scores import scored, visible


@triton.jit
def row_facts(LSE, DELTA, at, rows, F: tl.constexpr, RAGGED: tl.constexpr, BY_KEYS: tl.constexpr):
    """The lse, in units of log2, and delta of some queries. A row past the end has lse +inf: it weighs nothing."""
    if RAGGED:
        lse = tl.load(LSE + at, mask=rows < F.q_length, other=float("inf"))
        delta = tl.load(DELTA + at, mask=rows < F.q_length, other=0.0)
    else:
        lse = tl.load(LSE + at)
        delta = tl.load(DELTA + at)
    return as_queries(lse, BY_KEYS), as_queries(delta, BY_KEYS)


@triton.jit
def derivatives(
    bend, dp, lse, delta, bias, keep, queries, keys, head, F: tl.constexpr, MASKED: tl.constexpr,
    Q_RAGGED: tl.constexpr, KV_RAGGED: tl.constexpr,
):  # fmt: skip
    """The probabilities after dropout, and the derivative by the scores with all that is added to them.

    `bias` is `scores.biases` and `keep` is `dropout.weights`, or anything without dropout. Where a pair does not see
    each other both are zero: `dp` and `delta` are finite, and what is NaN is selected away.
    """
    p = tl.exp2(scored(bend, bias, queries, keys, head, F) * F.fold - lse)
    if MASKED:
        p = tl.where(visible(queries, keys, head, F, Q_RAGGED, KV_RAGGED, True), p, 0.0)
    if F.dropout:
        return p * keep, p * (dp * keep - delta)
    else:
        return p, p * (dp - delta)


@triton.jit
def unbent(ds, bend, F: tl.constexpr):
    """The derivative by the products, but for the scale: through the soft cap where there is one."""
    if F.capped:
        return ds * (1.0 - bend * bend)
    else:
        return ds
