# SPDX-License-Identifier: Apache-2.0
"""The block of one hop: this rank's queries, the visiting keys, and the global positions and indices of both."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..contract.call import IN_BLOCK, Call
from ..contract.protocol import LETTERS, Block, BlockKernel
from ..placement import axes
from ..placement.arrays import axes_with
from ..placement.layout import columns, indices, of_neighbours
from .directions import CALL_NAMES, Direction
from .hops import Plan

HELD: Final = tuple(name for name in LETTERS if name in CALL_NAMES)
"""The arrays of a call that its blocks hold, by their names there; keys and values are passed apart."""
OF_KEYS, BY_COLUMN = ({IN_BLOCK[name] for name in axes_with(Call, letter)} for letter in ("S", "S_global"))


@dataclasses.dataclass(frozen=True)
class Ring:
    """What is static about a call to the engine, beside the options of the call."""

    kernel: BlockKernel
    plan: Plan
    axis: tuple[str, ...]
    ranks: int
    """The number of shards of the queries."""
    stripe: int = 1
    """In the striped layout, the length of a run of consecutive tokens in a shard."""

    @property
    def gathers(self) -> bool:
        """Whether a rank gathers the keys of all ranks, in natural order. The plan is then that of one rank."""
        return self.ranks > self.plan.ranks


def gathered(ring: Ring, call: Call, rank: Any) -> Call:
    """All-gathers the ids and positions of keys, in the order of the ranks, so that the hops send only K,V.

    If the ring gathers keys and values too, all of them are in natural order.
    """
    if not ring.axis:
        return call

    def gather(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else all_gathered(ring, call.layout, rank, x, x.ndim - 1)

    return dataclasses.replace(call, kv_segment_ids=gather(call.kv_segment_ids), kv_positions=gather(call.kv_positions))


def all_gathered(ring: Ring, layout: str, rank: Any, x: jax.Array, axis: int) -> jax.Array:
    """The shards of all ranks along `axis`: in the order of the ranks, or in natural order where `ring.gathers`."""
    whole = axes.all_gathered(x, ring.axis, ring.ranks, rank, axis)
    return of_neighbours(whole, layout, ring.ranks, axis) if ring.gathers else whole


def source(ring: Ring, direction: Direction, offset: Any) -> Int32[Array, ""]:
    """The rank that owns the keys which have travelled `offset` ranks in this direction to this rank."""
    return ring.plan.source(direction.location.rank, offset, direction.sign)


def block(ring: Ring, direction: Direction, kv: Any, offset: Any) -> Block:
    """This rank's queries against the keys `kv`, which have travelled `offset` ranks in this direction."""
    call, location, ranks = direction.call, direction.location, ring.plan.ranks
    origin, batch = source(ring, direction, offset), call.query.shape[0]
    kv_length = jax.tree.leaves(kv)[0].shape[-3]
    q_index = indices(call.layout, ring.ranks, location.rank, call.query.shape[1], ring.stripe)[None]
    kv_index = indices(call.layout, ranks, origin, kv_length, ring.stripe)[None]

    def of_hop(name: str) -> Any:
        x = getattr(call, CALL_NAMES[name])
        if x is None:
            return None
        if name in BY_COLUMN:
            return columns(x, call.layout, ranks, origin, ring.stripe)
        return jax.lax.dynamic_slice_in_dim(x, origin * kv_length, kv_length, x.ndim - 1) if name in OF_KEYS else x

    found = {name: in_block_form(name, of_hop(name)) for name in HELD}
    first = 0 if call.query_offset is None else call.query_offset.reshape(-1, 1)
    by_layout = {"q_positions": q_index + first, "kv_positions": kv_index}
    found |= {name: x for name, x in by_layout.items() if found[name] is None}
    if found["seed"] is not None:
        found["seed"] = jnp.broadcast_to(found["seed"], (batch,))
    return Block(
        kv=kv,
        q_index=q_index,
        kv_index=kv_index,
        batch_index=location.batch_index,
        head_index=location.head_index,
        rule=call.rule,
        keys_from=_keys_from(call.layout, offset) if static_masks(ring.kernel) else None,
        **found,
    )


def static_masks(kernel: BlockKernel) -> bool:
    """Whether the kernel sets `static_masks`: it then gets `Block.keys_from`, and in `backward` also `Block.out`."""
    return getattr(kernel, "static_masks", False)


def _keys_from(layout: str, offset: Any) -> str:
    """The value of `Block.keys_from`. The offset of a rank's own keys is always the integer 0, never traced."""
    return "own" if isinstance(offset, int) and offset == 0 else layout


def in_block_form(name: str, x: jax.Array | None) -> Any:
    """An array of a call with all axes that it has in a `Block`; missing leading ones become 1."""
    return None if x is None else x.reshape((1,) * (len(LETTERS[name]) - x.ndim) + x.shape)
