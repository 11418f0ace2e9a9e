# SPDX-License-Identifier: Apache-2.0
"""The block of one hop: this rank's queries, the keys that are here, and the global positions and indices of both."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..contract.call import IN_BLOCK, Call
from ..contract.protocol import LETTERS, Block, BlockKernel
from ..placement.arrays import axes_with
from ..placement.layout import Shards
from .plan import Level, source
from .sends import KV, after_on_cpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """What is static about a call to the engine, beside the options of the call."""

    kernel: BlockKernel
    axis: tuple[str, ...]
    queries: Shards
    keys: Shards
    """The shards of keys: as of queries, or one in natural order if a rank gathers the keys of all ranks."""
    levels: tuple[Level, ...]
    """Innermost first; none if a rank needs no other rank's keys, or gathers them."""

    @property
    def gathers(self) -> bool:
        """Whether a rank gathers the keys of all ranks, and computes one block with them."""
        return self.keys.count < self.queries.count

    @property
    def passes_on(self) -> bool:
        """Whether keys are passed on from rank to rank, packed; a rank's own keys are then packed too."""
        return any(not level.straight for level in self.levels)


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

    def after_on_cpu(self, tokens: Any) -> "Location":
        """The location, whose rank XLA on CPU reads only after the tokens are computed.

        Positions and tile lists derive from the rank. Without this order XLA computes those of all hops at once.
        """
        return dataclasses.replace(self, rank=after_on_cpu(self.rank, tokens))


def owner(ring: Ring, location: Location, offset: Any) -> Any:
    """The number of the shard of keys that have travelled `offset` to this rank."""
    return 0 if ring.gathers else source(ring.levels, location.rank, offset)


def block(ring: Ring, call: Call, location: Location, kv: KV, offset: Any) -> Block:
    """This rank's queries against the keys in `kv`, which have travelled `offset`.

    The ids and positions of keys in `call` are those of all ranks.
    """
    origin, shard = owner(ring, location, offset), call.key.shape[1] * (ring.queries.count // ring.keys.count)
    q_index = ring.queries.indices(location.rank, call.query.shape[1])[None]
    kv_index = _rows(ring.keys.indices(origin, shard)[None], kv)

    def of_hop(name: str) -> Any:
        x = getattr(call, CALL_NAMES[name])
        if x is None:
            return None
        if name in BY_COLUMN:
            return _rows(ring.keys.columns(x, origin), kv)
        if name in OF_KEYS:
            return jax.lax.dynamic_slice_in_dim(x, origin * shard + kv.start, kv.length, x.ndim - 1)
        return x

    arrays = {name: in_block_form(name, of_hop(name)) for name in HELD}
    query_offset = 0 if call.query_offset is None else call.query_offset.reshape(-1, 1)
    by_layout = {"q_positions": q_index + query_offset, "kv_positions": kv_index}
    arrays |= {name: x for name, x in by_layout.items() if arrays[name] is None}
    if arrays["seed"] is not None:
        arrays["seed"] = jnp.broadcast_to(arrays["seed"], (call.query.shape[0],))
    return Block(
        kv=kv.arrays,
        q_index=q_index,
        kv_index=kv_index,
        batch_index=location.batch_index,
        head_index=location.head_index,
        rule=call.rule,
        keys_from=_keys_from(call.layout, offset) if static_masks(ring.kernel) else None,
        **arrays,
    )


def put_columns(ring: Ring, whole: jax.Array, part: jax.Array, shard: Any, start: int) -> jax.Array:
    """`whole`, whose last axis is over all keys, with `part` written to the keys of `shard` from its row `start` on.

    Columns for other rows of this shard become 0: no other hop has the shard.
    """
    missing = whole.shape[-1] // ring.keys.count - part.shape[-1]
    if missing:
        part = jnp.pad(part, ((0, 0),) * (part.ndim - 1) + ((start, missing - start),))
    return ring.keys.put_columns(whole, part, shard)


def _rows(x: jax.Array, kv: KV) -> jax.Array:
    """The entries of `x` for the rows in `kv`; the last axis of `x` is over the rows of the whole shard."""
    whole = x.shape[-1] == kv.length
    return x if whole else jax.lax.slice_in_dim(x, kv.start, kv.start + kv.length, axis=x.ndim - 1)


def static_masks(kernel: BlockKernel) -> bool:
    """Whether the kernel sets `static_masks`: it then gets `Block.keys_from`, and in `backward` also `Block.out`."""
    return getattr(kernel, "static_masks", False)


def _keys_from(layout: str, offset: Any) -> str:
    """The value of `Block.keys_from`. The offset of a rank's own keys is always the integer 0, never traced."""
    return "own" if isinstance(offset, int) and offset == 0 else layout


def in_block_form(name: str, x: jax.Array | None) -> Any:
    """`x`, a call's array, with all axes that `name` has in a `Block`: missing leading axes are added with length 1."""
    return None if x is None else x.reshape((1,) * (len(LETTERS[name]) - x.ndim) + x.shape)
