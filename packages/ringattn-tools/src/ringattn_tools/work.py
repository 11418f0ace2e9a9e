# SPDX-License-Identifier: Apache-2.0
"""How much attention a call computes: the sizes of one rank's arrays, and its pairs of queries and keys."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from ringattn_core.contract.call import Call

from .engine import Hops, hops_of_ring


@dataclasses.dataclass(frozen=True)
class Work:
    """The sizes of one rank's shard, the hops of the ring, and how many pairs of query and key kernels compute.

    `batch` and the numbers of heads are those of one rank. `pairs[i, j]` is the number of (query, key) pairs of one
    head and batch row that kernels compute for the queries of rank `i` and the keys of rank `j`. `others` is the bytes
    of all inputs but query, key and value that a rank holds, with key ids and positions of all ranks.
    """

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    hops: Hops
    pairs: np.ndarray = dataclasses.field(repr=False, compare=False)
    others: int = 0

    @classmethod
    def of_call(cls, call: Call, hops: Hops, pairs: np.ndarray) -> "Work":
        """The work of `call`, a call of one rank; reads only the shapes and dtypes of its arrays."""
        batch, q_length, heads, head_dim = call.query.shape
        _, kv_length, kv_heads, value_dim = call.value.shape
        operands, of_all_ranks = (call.query, call.key, call.value), (call.kv_segment_ids, call.kv_positions)
        return cls(
            batch=batch,
            q_length=q_length,
            kv_length=kv_length,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            itemsize=call.query.dtype.itemsize,
            hops=hops,
            pairs=pairs,
            others=data_bytes(call) - data_bytes(operands) + (hops.ranks - 1) * data_bytes(of_all_ranks),
        )

    @property
    def ranks(self) -> int:
        return self.hops.ranks

    @property
    def queries(self) -> int:
        """The number of elements of one rank's query array."""
        return self.batch * self.q_length * self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The number of elements of one rank's key and value arrays together."""
        return self.batch * self.kv_length * self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def outputs(self) -> int:
        """The number of elements of one rank's output array."""
        return self.batch * self.q_length * self.heads * self.value_dim

    @property
    def rows(self) -> int:
        """The number of elements of one rank's lse: one for each query of each head."""
        return self.batch * self.q_length * self.heads

    @property
    def operations(self) -> tuple[int, int]:
        """`(forward, backward)`: the floating-point operations of a (query, key) pair, over the batch and all heads."""
        return operations(self.batch, self.heads, self.head_dim, self.value_dim)

    @functools.cached_property
    def of_hops(self) -> np.ndarray:
        """How many (query, key) pairs of one head and batch row each rank computes at each hop, `[hops, ranks]`."""
        return self.pairs[np.arange(self.ranks), self.hops.sources]

    def over_heads(self, inner: int) -> "Work":
        """The work of one ring of `ranks // inner` ranks, after groups of `inner` ranks exchanged heads for tokens.

        A rank then has all tokens of its group, and `1 / inner` of the heads. Key heads are repeated if `inner` does
        not divide their number.
        """
        outer = self.ranks // inner
        pairs = self.pairs.reshape(outer, inner, outer, inner).sum((1, 3))
        rank = np.arange(outer)
        seen = (0, *(offset for offset in range(1, outer) if pairs[rank, (rank - offset) % outer].any()))
        kv_heads = math.lcm(self.kv_heads, inner) // inner
        moved = dataclasses.replace(
            self,
            q_length=self.q_length * inner,
            kv_length=self.kv_length * inner,
            heads=self.heads // inner,
            kv_heads=kv_heads,
            pairs=pairs,
        )
        return dataclasses.replace(moved, hops=hops_of_ring(outer, seen, moved.keys, self.itemsize))


def data_bytes(tree: Any) -> int:
    """The number of bytes of all arrays in `tree`, by their shapes and dtypes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def operations(batch: int, heads: int, head_dim: int, value_dim: int) -> tuple[int, int]:
    """`Work.operations` for these sizes: the forward pass has two matrix products, the backward pass five."""
    each = 2 * batch * heads
    return each * (head_dim + value_dim), each * (3 * head_dim + 2 * value_dim)
