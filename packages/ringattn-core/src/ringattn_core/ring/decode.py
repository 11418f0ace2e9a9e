# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries to a cache that is sharded over the ring. Ranks merge their results, and send no keys."""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ..contract.call import Call
from ..contract.merge import log_sum_exp, merged_over, with_sinks
from ..contract.protocol import Block, BlockKernel, Partial
from ..contract.varying import align, axes_of
from . import batching
from .blocks import block
from .directions import BLOCK_HEADS, Direction
from .engine import prepared, without_derivative
from .forward import sinks_of

SHORTEST_CHUNK: Final = 1024
"""The fewest keys in a chunk of a rank's cache."""
MOST_CHUNKS: Final = 256
"""The most chunks of all batch rows and key heads together: twice the multiprocessors of a large GPU."""


def decode(kernel: BlockKernel, call: Call) -> tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]:
    """`(out, lse)` of the queries against all keys. Every rank has all queries and a shard of the keys."""
    call = _not_differentiable(call)
    with jax.debug_infs(False):  # -inf is a valid score and a valid lse
        return _attend(kernel, call)


@functools.partial(jax.jit, static_argnums=0)
def _attend(kernel: BlockKernel, call: Call) -> Any:
    ring, call, location = prepared(kernel, call)
    here = Direction(1, *align((call, location), axes_of(call, location)))
    own = block(ring, here, (here.call.key, here.call.value), 0)
    # Query heads can become rows only if no other array of the block has a value for each query head.
    per_head = BLOCK_HEADS.keys() - {"q", "head_index"}
    group = own.group if all(getattr(own, name) is None for name in per_head) else 1
    count = _chunks(own)
    partial = batching.forward(kernel)(_chunked(_with_groups_as_rows(own, group), count), None)
    partial = _with_groups_as_heads(merged_over(partial, ring.axis, count), group)
    partial = with_sinks(partial, sinks_of(call))
    return partial.out.astype(call.query.dtype), log_sum_exp(partial)


def _chunks(block: Block) -> int:
    """The number of chunks that this rank's cache is cut into, so that a kernel occupies the whole device."""
    most = min(block.kv_length // SHORTEST_CHUNK, MOST_CHUNKS // (block.q.shape[0] * block.kv_heads))
    return next(count for count in range(max(most, 1), 0, -1) if block.kv_length % count == 0)


def _chunked(block: Block, count: int) -> Block:
    """The block with the chunks of its keys as batch rows. Keys and values are not moved in memory."""
    batch, length = block.q.shape[0], block.kv_length // count

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] * count, length, *x.shape[2:])

    of_keys = {name: jnp.tile(rows(getattr(block, name)), (batch, 1)) for name in ("kv_positions", "kv_index")}
    of_queries = {name: jnp.repeat(getattr(block, name), count, 0) for name in ("q", "q_positions", "batch_index")}
    return dataclasses.replace(block, kv=jax.tree.map(rows, block.kv), **of_keys, **of_queries)


def _with_groups_as_rows(block: Block, group: int) -> Block:
    """The block with the `group` query heads of each key head as rows of one head: kernels then read each key once."""
    batch, length, heads, size = block.q.shape
    q = block.q.reshape(batch, length, heads // group, group, size).swapaxes(2, 3)
    rows = block.map_queries(lambda x, axis: jnp.repeat(x, group, axis))
    return dataclasses.replace(
        rows, q=q.reshape(batch, length * group, -1, size), head_index=block.head_index[: heads // group]
    )


def _with_groups_as_heads(partial: Partial, group: int) -> Partial:
    """The inverse of `_with_groups_as_rows` for the result."""
    batch, rows, heads, size = partial.out.shape
    out = partial.out.reshape(batch, rows // group, group, heads, size).swapaxes(2, 3)
    lse = jnp.moveaxis(partial.lse.reshape(batch, heads, rows // group, group), 3, 2)
    return Partial(
        out.reshape(batch, rows // group, heads * group, size), lse.reshape(batch, heads * group, rows // group)
    )


_not_differentiable = without_derivative("decode_attention has no derivative. For training, call ring_attention")
