# SPDX-License-Identifier: Apache-2.0
"""The block of one hop: this rank's queries, the keys that are here, and the global positions and indices of both."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..contract.call import Call
from ..contract.expansion import Expansion
from ..contract.protocol import Block, BlockKernel
from ..contract.static_masks import wants_static_masks
from ..placement.layout import Shards
from .plan import Level, owner_rank
from .sends import KV, after_on_cpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static description of a ring: the kernel, the mesh axes, how tokens are sharded, and the loops of hops."""

    kernel: BlockKernel
    axis: tuple[str, ...]
    query_shards: Shards
    key_shards: Shards
    """How keys are sharded: like queries, or one shard in natural order if each rank gathers the keys of all ranks."""
    levels: tuple[Level, ...]
    """The loops of the ring, innermost first; empty if no rank needs another's keys, or if ranks gather all keys."""
    expand: Expansion | None = None
    """How a rank computes keys and values from the arrays that travel in their place."""

    @property
    def gathers(self) -> bool:
        """Whether each rank gathers the keys of all ranks, and computes one block with them."""
        return self.key_shards.count < self.query_shards.count

    @property
    def passes_on(self) -> bool:
        """Whether keys go from neighbour to neighbour: keys and values are then in one array, a rank's own too."""
        return self.expand is None and any(not level.direct for level in self.levels)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Location:
    """Which part of the whole call a rank has: its number on the ring, and the indices of its batch rows and heads.

    These are inputs, because the backward pass cannot compute them: the axis name of a `vmap` is bound in the forward
    pass only.
    """

    rank: Int32[Array, ""]
    batch_index: Int32[Array, " B"]
    head_index: Int32[Array, " N"]

    def after_on_cpu(self, done: Any) -> "Location":
        """This location, but on CPU XLA reads its rank only after the arrays in `done` are computed.

        Positions and tile lists derive from the rank. Without this order XLA computes them for all hops at once.
        """
        return dataclasses.replace(self, rank=after_on_cpu(self.rank, done))


def owner(ring: Ring, location: Location, offset: Any) -> Any:
    """The number of the shard whose keys have travelled `offset` to this rank."""
    return 0 if ring.gathers else owner_rank(ring.levels, location.rank, offset)


def block_of(ring: Ring, call: Call, location: Location, kv: KV, offset: Any) -> Block:
    """The `Block` of this rank's queries against the keys in `kv`, which have travelled `offset` (see `plan.Hop`).

    `call` has the segment ids and positions of the keys of all ranks (`whole_keys.with_all_ids`).
    """
    shard = owner(ring, location, offset)
    length = KV(call.travelling).length * (ring.query_shards.count // ring.key_shards.count)
    q_index = ring.query_shards.indices(location.rank, call.query.shape[1])[None]
    kv_index = _of_rows(kv, ring.key_shards.indices(shard, length)[None])
    query_offset = 0 if call.query_offset is None else call.query_offset.reshape(-1, 1)

    def of_keys(x: jax.Array | None) -> Any:
        """The entries of these keys, from an array over the keys of all ranks in the order of the ranks."""
        return x if x is None else jax.lax.dynamic_slice_in_dim(x, shard * length + kv.start, kv.length, x.ndim - 1)

    def columns(x: jax.Array | None) -> Any:
        """The columns of these keys, from an array over all keys in natural order."""
        return x if x is None else _of_rows(kv, ring.key_shards.columns(x, shard))

    return Block(
        q=call.query,
        kv=kv.arrays,
        q_positions=q_index + query_offset if call.q_positions is None else jnp.atleast_2d(call.q_positions),
        kv_positions=kv_index if call.kv_positions is None else jnp.atleast_2d(of_keys(call.kv_positions)),
        q_index=q_index,
        kv_index=kv_index,
        batch_index=location.batch_index,
        head_index=location.head_index,
        q_segments=call.q_segment_ids,
        kv_segments=of_keys(call.kv_segment_ids),
        bias=columns(call.bias),
        mask=columns(call.attention_mask),
        slopes=None if call.alibi_slopes is None else call.alibi_slopes[None],
        seed=None if call.dropout_seed is None else jnp.broadcast_to(call.dropout_seed, call.query.shape[:1]),
        rule=call.rule,
        keys_from=_keys_from(call.layout, offset) if wants_static_masks(ring.kernel) else None,
    )


def put_columns(ring: Ring, whole: jax.Array, part: jax.Array, shard: Any, start: int) -> jax.Array:
    """`whole` with `part` written to the columns of the keys of `shard`, from the shard's row `start` on.

    The last axis of `whole` has all keys, in natural order. The shard's other columns become 0: no other hop
    computes with this shard, so nothing else has written them.
    """
    missing = whole.shape[-1] // ring.key_shards.count - part.shape[-1]
    if missing:
        part = jnp.pad(part, ((0, 0),) * (part.ndim - 1) + ((start, missing - start),))
    return ring.key_shards.put_columns(whole, part, shard)


def _of_rows(kv: KV, x: jax.Array) -> jax.Array:
    """The entries of `x` for the rows that `kv` holds; the last axis of `x` has a whole shard, or just these rows."""
    whole = x.shape[-1] == kv.length
    return x if whole else jax.lax.slice_in_dim(x, kv.start, kv.start + kv.length, axis=x.ndim - 1)


def _keys_from(layout: str, offset: Any) -> str:
    """The value of `Block.keys_from`. Only the offset of a rank's own keys is the Python integer 0."""
    return "own" if isinstance(offset, int) and offset == 0 else layout
