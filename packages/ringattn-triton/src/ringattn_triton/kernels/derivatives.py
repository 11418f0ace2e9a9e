# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""What one tile is in every backward kernel: its probabilities from the final lse, and the derivatives by scores."""

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
    """The probabilities after dropout, the derivative by the scores with all that is added to them, and that by the
    products, but for the scale.

    `bias` is `scores.biases` and `keep` is `dropout.weights`, or anything without dropout. Where a pair does not see
    each other all are zero, selected last: whatever such a pair holds, `bend`, `dp` and their products may be infinite
    or NaN there.
    """
    p = tl.exp2(scored(bend, bias, queries, keys, head, F) * F.fold - lse)
    dropped = p
    if F.dropout:
        dropped = p * keep
        dp = dp * keep
    ds = p * (dp - delta)
    dproduct = ds
    if F.capped:
        dproduct = ds * (1.0 - bend * bend)
    if MASKED:
        seen = visible(queries, keys, head, F, Q_RAGGED, KV_RAGGED, True)
        dropped = tl.where(seen, dropped, 0.0)
        ds = tl.where(seen, ds, 0.0)
        dproduct = tl.where(seen, dproduct, 0.0)
    return dropped, ds, dproduct
