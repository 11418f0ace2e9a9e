# SPDX-License-Identifier: Apache-2.0
"""What the engine is given on each rank, found by tracing the call as it would be made."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..call import options, sharding
from ..call.validation import validated
from ..contract import packing
from ..contract.features import Feature
from ..contract.tiles import tiles
from ..ring import engine
from ..ring.blocks import Differentiable, Fixed, Ring, block, gathered
from .request import AXIS, Request

_TILE: Final = 128
_MOST_TILES: Final = 2**22
"""Pairs of tiles up to which the default tile stays small."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """What one rank works with: its inputs, and the ring.

    `needs` is what the whole call asks of a backend, `specs` how its arrays are split.
    """

    inputs: Differentiable
    fixed: Fixed
    ring: Ring = dataclasses.field(metadata={"static": True})
    needs: frozenset[Feature] = dataclasses.field(metadata={"static": True})
    specs: tuple[tuple[str, PartitionSpec], ...] = dataclasses.field(metadata={"static": True})


def shard(request: Request, kernel: Any = None) -> Shard:
    """The shapes of one rank's share; nothing is computed. What the ring sends may depend on the kernel."""
    stacked = jax.eval_shape(functools.partial(_every_rank, request, kernel, lambda shard: shard), request.integers())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def visited(request: Request, shard: Shard, offsets: Sequence[int], q_tile: int, kv_tile: int) -> np.ndarray:
    """0 where a tile is skipped, 1 where it is masked, 2 where it is seen whole: `[ranks, offsets, q tiles, kv tiles]`.

    Of the first row of the batch, and of all heads together.
    """
    q_length, kv_length = shard.inputs.q.shape[1], shard.inputs.k.shape[1]
    lengths = (_whole(q_length, q_tile), _whole(kv_length, kv_tile))

    def of_rank(shard: Shard) -> jax.Array:
        ring, inputs, fixed = shard.ring, shard.inputs, gathered(shard.ring, shard.fixed)
        kv = packing.pack(inputs.k, inputs.v)

        def of_hop(offset: jax.Array) -> jax.Array:
            found = tiles(block(ring, inputs, kv, fixed, offset).padded_to(*lengths), q_tile, kv_tile)
            return found.some[0].astype(jnp.uint8) + found.full[0].astype(jnp.uint8)

        return jax.vmap(of_hop)(jnp.asarray(offsets, jnp.int32))

    # Under `jit` the arrays whose shapes alone are read are never made.
    return np.asarray(jax.jit(functools.partial(_every_rank, request, None, of_rank))(request.integers()))


def default_tiles(shard: Shard) -> tuple[int, int]:
    """128 by 128, or as much larger as keeps the tiles of all ranks countable; never longer than a shard."""
    lengths = shard.inputs.q.shape[1], shard.inputs.k.shape[1]
    tile = _TILE
    while math.prod(shard.ring.plan.ranks * -(-length // tile) for length in lengths) > _MOST_TILES:
        tile *= 2
    return min(tile, lengths[0]), min(tile, lengths[1])


def _every_rank(request: Request, kernel: Any, work: Any, integers: dict[str, Any]) -> Any:
    """`work` on the shard of each rank, stacked: `vmap` plays the ranks, as `shard_map` would on devices."""
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in request.floating().items()}
    mesh = request.mesh
    call, roles = sharding.prepared(validated(**zeros, **integers, **request.options(), ranks=1), mesh)
    needs, specs = options.needs(call), sharding.specs(call, roles)
    arrays, split = {}, {}
    for name, spec in specs.items():
        x = getattr(call, name)
        axis = next((number for number, entry in enumerate(spec) if entry == AXIS), None)
        arrays[name], split[name] = x, axis
        if axis is not None:
            arrays[name] = x.reshape(*x.shape[:axis], request.ring, -1, *x.shape[axis + 1 :])
    rest = dataclasses.replace(call, **dict.fromkeys(options.ARRAYS))

    def of_rank(local: dict[str, jax.Array]) -> Any:
        ring, inputs, fixed = engine.prepared(kernel, dataclasses.replace(rest, **local))
        return work(Shard(inputs, fixed, ring, needs, tuple(specs.items())))

    return jax.vmap(of_rank, (split,), axis_name=AXIS, axis_size=request.ring)(arrays)


def _whole(length: int, tile: int) -> int:
    return -(-length // tile) * tile
