# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""How a vector of queries, or of keys, lies in a tile: queries are rows, or columns where `BY_KEYS`."""

import triton
import triton.language as tl


@triton.jit
def as_queries(x, BY_KEYS: tl.constexpr):
    """A vector along the axis of the queries."""
    if BY_KEYS:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def as_keys(x, BY_KEYS: tl.constexpr):
    """A vector along the axis of the keys."""
    if BY_KEYS:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def unsigned(x):
    return x.to(tl.uint32, bitcast=True)
