# SPDX-License-Identifier: Apache-2.0
"""How much attention a call computes: the sizes of one rank's arrays, and its pairs of queries and keys."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from ringattn_core.contract.call import Call

from .engine import Hops, hops_of_call


@dataclasses.dataclass(frozen=True)
class Work:
    """The call of one rank, in shapes only, the hops of its ring, and how many pairs of query and key kernels compute.

    `pairs[i, j]` is the number of (query, key) pairs of one head and batch row that a kernel computes where rank `i`
    has the keys of rank `j`.
    """

    call: Call
    hops: Hops
    pairs: np.ndarray = dataclasses.field(repr=False, compare=False)

    @property
    def ranks(self) -> int:
        return self.hops.ranks

    @property
    def itemsize(self) -> int:
        return self.call.query.dtype.itemsize

    @property
    def queries(self) -> int:
        """The number of elements of one rank's query array."""
        return self.call.query.size

    @property
    def keys(self) -> int:
        """The number of elements of one rank's key and value arrays together."""
        return self.call.key.size + self.call.value.size

    @property
    def rows(self) -> int:
        """The number of elements of one rank's lse: one for each query of each head."""
        return math.prod(self.call.query.shape[:3])

    @property
    def outputs(self) -> int:
        """The number of elements of one rank's output array."""
        return self.rows * self.call.value.shape[3]

    @property
    def operations(self) -> tuple[int, int]:
        """`(forward, backward)`: the floating-point operations of a (query, key) pair, over the batch and all heads."""
        batch, _, heads, head_dim = self.call.query.shape
        return operations(batch, heads, head_dim, self.call.value.shape[3])

    @functools.cached_property
    def of_hops(self) -> np.ndarray:
        """How many (query, key) pairs of one head and batch row each rank computes at each hop, `[hops, ranks]`."""
        return self.pairs[np.arange(self.ranks), self.hops.sources]

    def over_heads(self, inner: int) -> "Work":
        """The work of one ring of `ranks // inner` ranks, after groups of `inner` ranks exchanged heads for tokens.

        A rank then has all tokens of its group, and `1 / inner` of the heads. Key heads are repeated if `inner` does
        not divide their number.
        """
        outer, call = self.ranks // inner, self.call
        key_heads = math.lcm(call.key.shape[2], inner)

        def exchanged(x: Any, heads: int) -> Any:
            return jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * inner, heads // inner, x.shape[3]), x.dtype)

        call = dataclasses.replace(
            call,
            query=exchanged(call.query, call.query.shape[2]),
            key=exchanged(call.key, key_heads),
            value=exchanged(call.value, key_heads),
        )
        pairs = self.pairs.reshape(outer, inner, outer, inner).sum((1, 3))
        return Work(call, hops_of_call(call, outer, outer, stripe=inner), pairs)


def data_bytes(tree: Any) -> int:
    """The number of bytes of all arrays in `tree`, by their shapes and dtypes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def operations(batch: int, heads: int, head_dim: int, value_dim: int) -> tuple[int, int]:
    """`Work.operations` for these sizes: the forward pass has two matrix products, the backward pass five."""
    each = 2 * batch * heads
    return each * (head_dim + value_dim), each * (3 * head_dim + 2 * value_dim)
