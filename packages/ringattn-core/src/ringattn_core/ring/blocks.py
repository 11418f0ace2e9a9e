# SPDX-License-Identifier: Apache-2.0
"""What one hop works on: this rank's queries, the visiting keys, and everything global about both."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..contract.protocol import Block, BlockKernel
from ..contract.rule import Rule
from ..placement import arrays
from ..placement.layout import columns, indices
from .hops import Plan


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static half of a call to the engine."""

    kernel: BlockKernel
    rule: Rule
    plan: Plan
    layout: str
    axis: tuple[str, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Differentiable:
    """The inputs with a gradient. Replicated ones are aligned, so that JAX sums their gradients."""

    q: arrays.Query
    k: arrays.Key
    v: arrays.Value
    sinks: arrays.Sinks | None
    bias: arrays.Bias | None
    slopes: arrays.Slopes | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed:
    """The inputs without a gradient; those of the keys are gathered over the ring.

    `rank`, and the global indices of batch and heads, are inputs because a vmapped axis is bound in the forward only.
    """

    rank: Int32[Array, ""]
    batch_index: Int32[Array, " B"]
    head_index: Int32[Array, " N"]
    q_segments: arrays.QueryIds | None
    kv_segments: arrays.KeyIds | None
    q_positions: arrays.QueryPositions | None
    kv_positions: arrays.KeyPositions | None
    mask: arrays.DenseMask | None
    seed: arrays.Seed | None


def gathered(ring: Ring, fixed: Fixed) -> Fixed:
    """Ids and positions of all keys, in the order of the ranks: gathered once, so that only K,V travels."""
    if not ring.axis:
        return fixed

    def gather(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jax.lax.all_gather(x, ring.axis, axis=1, tiled=True)

    return dataclasses.replace(fixed, kv_segments=gather(fixed.kv_segments), kv_positions=gather(fixed.kv_positions))


def source(ring: Ring, fixed: Fixed, offset: Any) -> Int32[Array, ""]:
    """The rank whose keys this rank works on after they have come `offset` ranks onward; below 0 is back."""
    return (fixed.rank - offset) % ring.plan.ranks


def block(ring: Ring, inputs: Differentiable, kv: Any, fixed: Fixed, offset: Any) -> Block:
    """This rank's queries against the keys `kv` that have come `offset` ranks onward; `fixed` is gathered."""
    origin, ranks = source(ring, fixed, offset), ring.plan.ranks
    batch, q_length = inputs.q.shape[:2]
    kv_length = jax.tree.leaves(kv)[0].shape[-3]
    q_index = indices(ring.layout, ranks, fixed.rank, q_length)[None]
    kv_index = indices(ring.layout, ranks, origin, kv_length)[None]

    def visiting(x: jax.Array | None) -> Any:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, origin * kv_length, kv_length, 1)

    def of_columns(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else columns(x, ring.layout, ranks, origin)

    return Block(
        q=inputs.q,
        kv=kv,
        q_positions=q_index if fixed.q_positions is None else fixed.q_positions,
        kv_positions=kv_index if fixed.kv_positions is None else visiting(fixed.kv_positions),
        q_index=q_index,
        kv_index=kv_index,
        batch_index=fixed.batch_index,
        head_index=fixed.head_index,
        q_segments=fixed.q_segments,
        kv_segments=visiting(fixed.kv_segments),
        bias=of_columns(inputs.bias),
        mask=of_columns(fixed.mask),
        slopes=None if inputs.slopes is None else inputs.slopes[None].astype(jnp.float32),
        seed=None if fixed.seed is None else jnp.broadcast_to(fixed.seed, (batch,)),
        rule=ring.rule,
    )
