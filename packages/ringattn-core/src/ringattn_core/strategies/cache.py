# SPDX-License-Identifier: Apache-2.0
"""Attention to a cache that is sharded over the ring: ranks merge their partial results, and send no keys."""

import dataclasses
import functools
from typing import Final

import jax
import jax.numpy as jnp

from ..contract import batching, bits, heads_as_rows
from ..contract.call import Call
from ..contract.merge import merged, merged_over
from ..contract.protocol import Block, BlockKernel, Partial
from ..contract.varying import align, axes_of
from ..errors import DerivativeError
from ..placement import axes
from ..placement.arrays import axes_with
from ..placement.layout import Shards
from ..ring.blocks import block_of, queries_of
from ..ring.engine import ring_of, without_derivative
from ..ring.forward import beginning
from ..ring.kv import KV

SHORTEST_CHUNK: Final = 1024
"""The fewest keys in a chunk, if a rank's cache is cut into chunks that a kernel runs in parallel."""
BY_HEAD: Final = {name: axis for name, axis in axes_with(Block, "N", "n").items() if name not in ("q", "head_index")}
"""The optional arrays of a block that may have a value for each query head, with their axis of heads."""
MOST_CHUNKS: Final = 128
"""The most chunks of all batch rows and key heads together: about the number of multiprocessors of a large GPU."""


@functools.partial(jax.jit, static_argnums=0)
def attend(kernel: BlockKernel, call: Call) -> Partial:
    """Attention of this rank's queries to the keys of all ranks.

    If the call has a `query_offset`, queries are sharded like the cache: an all-gather gives all of them to every rank,
    and each rank gets its share of the merged result. Otherwise every rank already has all queries, which are few.
    """
    sharded = call.query_offset is not None
    everyone = _with_all_queries(call) if sharded else call
    ring = ring_of(kernel, everyone)
    ring, here = align((ring, everyone), axes_of(ring, everyone))
    queries = queries_of(ring, here)
    # `block_of` takes the positions of the keys of all ranks, and here each rank has those of its own keys only.
    without_positions = dataclasses.replace(here, kv_positions=None)
    own = block_of(ring, without_positions, queries, KV((here.key, here.value)), ring.rank)
    if here.kv_positions is not None:
        own = dataclasses.replace(own, kv_positions=jnp.atleast_2d(here.kv_positions))
    elif not sharded:
        # Queries are consecutive tokens, although they have `q_positions`, which could come in any order.
        own = dataclasses.replace(own, monotone=queries.monotone)
    whole, sinks = sharded or takes_whole(kernel, own), beginning(call)
    group, chunks = (1, 1) if whole else (_group(own), _chunks(own))
    asked = own if whole else _chunked(heads_as_rows.as_rows(own, group), chunks)
    begun = sinks if whole and not ring.axis else None  # a kernel that gets all keys begins from the sinks
    asked = dataclasses.replace(asked, final=not ring.axis and chunks == 1 and begun is sinks)
    partial = merged_over(batching.forward(kernel)(asked, begun), ring.axis, chunks, scattered=sharded)
    partial = heads_as_rows.partial_of_heads(partial, group)
    if sinks is not None and begun is None:
        partial = merged([partial, sinks])
    assert partial.out is not None
    return Partial(partial.out.astype(call.query.dtype), partial.lse)


def takes_whole(kernel: BlockKernel, block: Block) -> bool:
    """Whether the kernel gets the queries as they are, with all keys of this rank: at most `few_queries` a key head.

    Not with bits, which kernels for few queries need not take.
    """
    return block.bits is None and block.q_length * block.group <= getattr(kernel, "few_queries", 0)


def not_differentiable(call: Call) -> Call:
    """Returns a call for `attend` with the same values; differentiating it raises `DerivativeError`."""
    return (_few_queries if call.query_offset is None else _sharded_queries)(call)


_few_queries = without_derivative(
    lambda: DerivativeError("decode_attention has no derivative. For training, call ring_attention")
)
_sharded_queries = without_derivative(
    lambda: DerivativeError("prefill_attention has no derivative where it sends the queries. Pass send='keys'")
)


def _with_all_queries(call: Call) -> Call:
    """The call with the queries of all ranks, in the order of the ranks, and the positions of these queries."""
    assert call.query_offset is not None
    axis = call.placement.roles.sequence
    ranks, whole = axes.size(axis), functools.partial(jax.lax.all_gather, axis_name=axis, tiled=True)
    index = Shards(call.placement.layout, ranks).order(ranks * call.query.shape[1])
    by_query = {"kv_first": 2, "kv_last": 2, "selected": 1}
    found = {name: whole(x, axis=axis) for name, axis in by_query.items() if (x := getattr(call, name)) is not None}
    return dataclasses.replace(
        call,
        query=whole(call.query, axis=1),
        q_positions=call.query_offset.reshape(-1, 1) + index[None],
        query_offset=None,
        **found,
    )


def _group(block: Block) -> int:
    """How many query heads of one key head become rows of queries: all, or 1 if an array has values by head."""
    by_head = (x.shape[axis] > 1 for name, axis in BY_HEAD.items() if (x := getattr(block, name)) is not None)
    by_bits = block.bits is not None and block.bits.shape[1] > block.kv_heads
    return 1 if by_bits or any(by_head) else block.group


def _chunks(block: Block) -> int:
    """The number of chunks that this rank's cache is cut into, so that a kernel occupies the whole device."""
    most = min(block.kv_length // SHORTEST_CHUNK, MOST_CHUNKS // (block.q.shape[0] * block.kv_heads))
    counts = range(max(most, 1), 1, -1)
    return next((count for count in counts if block.kv_length % (count * block.grain) == 0), 1)


def _chunked(block: Block, count: int) -> Block:
    """The block with its keys cut into `count` chunks as batch rows, each with all queries; no keys move in memory."""
    batch, length = block.q.shape[0], block.kv_length // count

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] * count, length, *x.shape[2:])

    of_keys = {name: rows(getattr(block, name)) for name in ("kv_positions", "kv_index")}
    of_keys = {name: jnp.tile(x, (batch * count // len(x), 1)) for name, x in of_keys.items()}
    repeated = ["q", "batch_index"]
    if batch > 1:  # otherwise one row serves all chunks
        by_row = {name: getattr(block, name) for name in ("q_positions", "first", "last")}
        repeated += [name for name, x in by_row.items() if x is not None and len(x) > 1]
    of_queries = {name: jnp.repeat(getattr(block, name), count, 0) for name in repeated}
    if block.bits is not None and count > 1:  # a chunk has whole bits
        chunks = jnp.moveaxis(bits.of_parts(block.bits, count, length // block.grain), 3, 1)
        of_keys["bits"] = chunks.reshape(-1, *chunks.shape[2:])
    return dataclasses.replace(block, kv=jax.tree.map(rows, block.kv), **of_keys, **of_queries)
