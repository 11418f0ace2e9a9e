# SPDX-License-Identifier: Apache-2.0
"""Which blocks the one-pass backward takes on Hopper, and how it is launched."""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32
from ringattn_core.config import BwdParams
from ringattn_core.contract.protocol import Block, Gradients

from .. import tables
from ..launch import launch
from ..operands import LOG2_E, Facts, Operands, power_of_two

_HALF: Final = 64 * 64
"""Numbers in half a tile of dq."""
_PLACES: Final = 132
"""How many programs run at a time: one on each multiprocessor of the largest Hopper. Others find nothing to do."""
_TOGETHER: Final = 512
"""How many turns the heads that go together have: few enough for their queries to stay in the cache."""
_ALL_TOGETHER: Final = 2**30
"""All heads go together where turns wait for each other: few turns of one head then run at a time."""
_LIMIT: Final = 168
"""Registers of a thread when a program begins."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernel runs. `ordered` turns add to dq in the order of their numbers, so that bits repeat.

    `masked` says that there are tiles to mask at all; `registers` are a consumer's. `side_by_side` is how many key
    tiles of a head run at a time where turns are ordered, else 1.
    """

    q_tile: int
    ordered: bool
    masked: bool
    side_by_side: int
    kv_tile: int = 128
    stages: int = 2
    ds_places: int = 2
    dq_places: int = 1
    registers: int = 240

    @property
    def barriers(self) -> int:
        """Room for those in `shared.shared_places`; Triton wants a power of two."""
        return power_of_two(6 + 4 * self.stages + self.ds_places + 4 * self.dq_places)


def why_not(block: Block, facts: Facts) -> str | None:
    """What of a block the one-pass backward has no code for, or `None` where it takes it."""
    reasons = {
        "dtypes of other than 16 bits": block.q.dtype.itemsize != 2,
        "head sizes other than 64 and 128": facts.head_dim not in (64, 128) or facts.value_dim != facts.head_dim,
        "soft caps": facts.capped,
        "scales of zero and less": not facts.plain and not (facts.bias or facts.slopes),
        "bias": facts.bias,
        "slopes": facts.slopes,
        "dropout": facts.dropout,
        "predicate masks": facts.masks,
        "dense masks": facts.dense,
        "tile sizes that the caller fixed": block.rule.bwd_params != BwdParams(),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def backward(
    given: Operands,
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"] | None,
    final: bool,
    ordered: bool = True,
) -> Gradients:
    """The gradients of a block that this kernel takes."""
    from .dq import finish_dq
    from .kernel import one_pass

    facts = given.facts
    batch, length, heads, dim = block.q.shape
    masked = any((facts.below, facts.above, facts.segments, facts.padded)) or facts.kv_length % 128 != 0
    q_tile, kv_tile = 64 if dim == 128 else 128, 128
    table = tables.table(
        given, block, q_tile, kv_tile, by_keys=True, programs=_ALL_TOGETHER if ordered else _TOGETHER
    )
    side_by_side = -(-_PLACES // table.visits.together) if ordered else 1
    plan = Plan(q_tile=q_tile, ordered=ordered, masked=masked, side_by_side=side_by_side)
    turns = table.visits.rows * batch * facts.kv_heads
    q_tiles = table.visits.columns
    more = [(0, 0), (0, 0), (0, q_tiles * plan.q_tile - length)]
    # A row that sees nothing, or lies past the end, weighs nothing.
    weight = jnp.pad(jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E), more, constant_values=jnp.inf)
    counters = jnp.zeros(1 + (batch * heads * q_tiles if ordered else 0), jnp.int32)
    sums = jnp.zeros(batch * heads * q_tiles * 2 * _HALF, jnp.float32)
    ranks = _ranks(given, block, plan) if ordered else None
    arrays = [*given.arrays, table.bounds, table.tiles, dout, weight, jnp.pad(-delta, more), ranks, counters, sums]
    dk, dv, _, sums = launch(
        one_pass,
        arrays,
        [
            *(jax.ShapeDtypeStruct(x.shape, x.dtype if final else jnp.float32) for x in (block.k, block.v)),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
            jax.ShapeDtypeStruct(sums.shape, sums.dtype),
        ],
        grid=(min(_PLACES, turns),),
        warps=4,
        stages=1,
        registers=_LIMIT,
        aliases={len(arrays) - 2: 2, len(arrays) - 1: 3},
        name="ringattn_hopper_backward",
        F=facts,
        V=table.visits,
        BATCH=batch,
        PLAN=plan,
    )
    (dq,) = launch(
        finish_dq,
        [sums, dq],
        [jax.ShapeDtypeStruct(block.q.shape, block.q.dtype if final else jnp.float32)],
        grid=(batch * heads * q_tiles * 2,),
        warps=4,
        stages=1,
        aliases={} if dq is None else {1: 0},
        name="ringattn_hopper_finish_dq",
        Q_LENGTH=length,
        HEADS=heads,
        DIM=dim,
        Q_TILES=q_tiles,
        SCALE=facts.scale,
        FRESH=dq is None,
    )
    return Gradients(dq, dk, dv)


def _ranks(given: Operands, block: Block, plan: Plan) -> Int32[Array, "g rows columns"]:
    """For each key tile and query tile that see each other, how many earlier turns visit that query tile."""
    seen = jnp.swapaxes(tables.seen(given, block, plan.q_tile, plan.kv_tile).some, 1, 2).astype(jnp.int32)
    number = np.arange(seen.shape[1])
    first = number // plan.side_by_side * plan.side_by_side
    row = np.minimum(first + plan.side_by_side, seen.shape[1]) - 1 - (number - first)  # as in `schedule.work_of`
    by_turn = seen[:, row]
    return (jnp.cumsum(by_turn, 1, dtype=jnp.int32) - by_turn)[:, row]
