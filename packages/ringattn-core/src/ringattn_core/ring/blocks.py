# SPDX-License-Identifier: Apache-2.0
"""The block of one hop: this rank's queries, the keys that are here, and the global positions and indices of both."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..contract import bits
from ..contract.call import Call
from ..contract.key_ranges import in_indices
from ..contract.protocol import Block, BlockKernel
from ..contract.static_masks import wants_key_indices, wants_static_masks
from ..contract.varying import align, axes_of
from ..contract.visibility import Queries, intervals
from ..masks import Coordinates
from ..placement.layout import Shards
from . import selected
from .kv import KV
from .plan import Level


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring as one rank sees it: the kernel, how tokens are sharded, the loops of hops, and which shard the rank has.

    The rank and the indices are arrays: the backward pass cannot compute them, because the axis name of a `vmap` is
    bound in the forward pass only.
    """

    kernel: BlockKernel = dataclasses.field(metadata={"static": True})
    axis: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    query_shards: Shards = dataclasses.field(metadata={"static": True})
    key_shards: Shards = dataclasses.field(metadata={"static": True})
    """How keys are sharded: like queries, or one shard in natural order if each rank gathers the keys of all ranks."""
    levels: tuple[Level, ...] = dataclasses.field(metadata={"static": True})
    """The loops of the ring, innermost first; empty if no rank needs another's keys, or if ranks gather all keys."""
    rank: Int32[Array, ""]
    batch_index: Int32[Array, " B"]
    """The global index of each row of this rank's batch."""
    head_index: Int32[Array, " N"]
    """The global index of each of this rank's query heads."""

    @property
    def all_gather(self) -> bool:
        """Whether each rank gathers the keys of all ranks, and computes one block with them."""
        return self.key_shards.count < self.query_shards.count


def queries_of(ring: Ring, call: Call) -> Queries:
    """The queries of this rank, computed once a call."""
    index = _indices(ring, ring.query_shards, ring.rank, call.query.shape[1])
    offset = 0 if call.query_offset is None else call.query_offset.reshape(-1, 1)
    positions = index + offset if call.q_positions is None else jnp.atleast_2d(call.q_positions)
    at = Coordinates(positions, index)
    return intervals(call.reach, call.built, call.kv_range, at, ring.head_index, call.natural)


def block_of(ring: Ring, call: Call, queries: Queries, kv: KV, owner: Any) -> Block:
    """The `Block` of this rank's queries against the keys in `kv`, of the shard of rank `owner`.

    `call` has the segment ids and positions of the keys of all ranks (`key_ids.with_all_ids`). With
    `ring.all_gather`, these keys are one shard, and `owner` is 0.
    """
    length = KV(call.travelling).length * (ring.query_shards.count // ring.key_shards.count)
    kv_index = _of_rows(kv, _indices(ring, ring.key_shards, owner, length))

    def of_keys(x: jax.Array | None) -> Any:
        """The entries of these keys, from an array over the keys of all ranks in the order of the ranks."""
        return x if x is None else jax.lax.dynamic_slice_in_dim(x, owner * length + kv.start, kv.length, x.ndim - 1)

    def columns(x: jax.Array | None) -> Any:
        """The columns of these keys, from an array over all keys in natural order."""
        return x if x is None else _of_rows(kv, ring.key_shards.columns(x, owner))

    kv_positions = kv_index if call.kv_positions is None else jnp.atleast_2d(of_keys(call.kv_positions))
    of_masks = bits.of_masks(
        queries.masks,
        jnp.asarray(call.built.of_head, jnp.int32)[ring.head_index] if queries.masks else None,
        columns(call.attention_mask),
        queries.at,
        Coordinates(kv_positions, kv_index),
    )
    chosen = selected.bits_of(call, ring.key_shards, owner, length, kv)
    seen = bits.both(of_masks, chosen, call.query.shape[2], kv.length)
    words, of_head, grain = (None, None, 1) if seen is None else seen
    block = Block(
        q=call.query,
        kv=kv.arrays,
        first=queries.first,
        last=queries.last,
        q_positions=queries.at.positions,
        kv_positions=kv_positions,
        q_index=queries.at.index,
        kv_index=kv_index,
        batch_index=ring.batch_index,
        head_index=ring.head_index,
        q_segments=call.q_segment_ids,
        kv_segments=of_keys(call.kv_segment_ids),
        bias=columns(call.bias),
        bits=words,
        bits_of_head=of_head,
        slopes=None if call.alibi_slopes is None else call.alibi_slopes[None],
        seed=None if call.dropout_seed is None else jnp.broadcast_to(call.dropout_seed, call.query.shape[:1]),
        rule=call.rule,
        grain=grain,
        reach=call.reach & call.built.reach,
        monotone=queries.monotone and call.q_positions is None and call.kv_positions is None,
        keys_from=(ring.key_shards.layout if kv.received else "own") if wants_static_masks(ring.kernel) else None,
    )
    return in_indices(block, ring.key_shards, owner, length, kv.start) if wants_key_indices(ring.kernel) else block


def _indices(ring: Ring, shards: Shards, rank: Any, length: int) -> Int32[Array, "1 length"]:
    """`Shards.indices`, varying over the mesh axes that the rank varies over, also where they are a constant."""
    return align(shards.indices(rank, length)[None], axes_of(ring.rank))


def _of_rows(kv: KV, x: jax.Array) -> jax.Array:
    """The entries of `x` for the rows that `kv` holds; the last axis of `x` has a whole shard, or only these rows."""
    whole = x.shape[-1] == kv.length
    return x if whole else jax.lax.slice_in_dim(x, kv.start, kv.start + kv.length, axis=x.ndim - 1)
