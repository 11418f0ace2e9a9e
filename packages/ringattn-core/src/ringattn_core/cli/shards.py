# SPDX-License-Identifier: Apache-2.0
"""What each rank of a call holds, and which of its tiles are visible: found by tracing the call."""

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
from .abstract_call import AXIS, AbstractCall

_TILE: Final = 128
_MOST_TILES: Final = 2**22
"""The default tile grows until all ranks together have at most so many pairs of tiles."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """The inputs of one rank as the ring engine gets them.

    `needs` are the features that the whole call asks of a backend, `specs` how each of its arrays is split.
    """

    inputs: Differentiable
    fixed: Fixed
    ring: Ring = dataclasses.field(metadata={"static": True})
    needs: frozenset[Feature] = dataclasses.field(metadata={"static": True})
    specs: tuple[tuple[str, PartitionSpec], ...] = dataclasses.field(metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, int]:
        """The queries and the keys of one rank, padding included."""
        return self.inputs.q.shape[1], self.inputs.k.shape[1]

    @property
    def elements(self) -> int:
        """The number of elements of this rank's packed K,V."""
        return self.inputs.k.size + self.inputs.v.size


def shard(call: AbstractCall, kernel: Any = None) -> Shard:
    """The shapes of one rank's inputs; computes nothing. `kernel` may change what the ring sends."""
    stacked = jax.eval_shape(functools.partial(_every_rank, call, kernel, lambda shard: shard), call.integers())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def tile_states(call: AbstractCall, shard: Shard, offsets: Sequence[int], tile: tuple[int, int]) -> np.ndarray:
    """0 where a tile is skipped, 1 where it is masked, 2 where it is all visible: `[ranks, offsets, q tiles, kv tiles]`.

    Computed for the first row of the batch; a tile counts as visible if any head sees it.
    """
    padded = [-(-length // size) * size for length, size in zip(shard.lengths, tile, strict=True)]

    def of_rank(shard: Shard) -> jax.Array:
        ring, inputs, fixed = shard.ring, shard.inputs, gathered(shard.ring, shard.fixed)
        kv = packing.pack(inputs.k, inputs.v)

        def of_hop(offset: jax.Array) -> jax.Array:
            found = tiles(block(ring, inputs, kv, fixed, offset).padded_to(*padded), *tile)
            return found.some[0].astype(jnp.uint8) + found.full[0].astype(jnp.uint8)

        return jax.vmap(of_hop)(jnp.asarray(offsets, jnp.int32))

    # Under `jit` XLA drops the large arrays, of which only the shapes are read.
    return np.asarray(jax.jit(functools.partial(_every_rank, call, None, of_rank))(call.integers()))


def default_tile(shard: Shard) -> tuple[int, int]:
    """128 by 128, larger for very long sequences, and never longer than a shard."""
    tile = _TILE
    while math.prod(shard.ring.plan.ranks * -(-length // tile) for length in shard.lengths) > _MOST_TILES:
        tile *= 2
    return min(tile, shard.lengths[0]), min(tile, shard.lengths[1])


def _every_rank(call: AbstractCall, kernel: Any, work: Any, integers: dict[str, Any]) -> Any:
    """`work` on the shard of each rank, stacked: `vmap` stands for the ranks, as `shard_map` would on devices."""
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in call.floating().items()}
    whole, roles = sharding.prepared(validated(**zeros, **integers, **call.options(), ranks=1), call.mesh)
    needs, specs = options.needs(whole), sharding.specs(whole, roles)
    arrays, split = {}, {}
    for name, spec in specs.items():
        x = getattr(whole, name)
        axis = next((number for number, entry in enumerate(spec) if entry == AXIS), None)
        arrays[name], split[name] = x, axis
        if axis is not None:
            arrays[name] = x.reshape(*x.shape[:axis], call.ring, -1, *x.shape[axis + 1 :])
    rest = dataclasses.replace(whole, **dict.fromkeys(options.ARRAYS))

    def of_rank(local: dict[str, jax.Array]) -> Any:
        ring, inputs, fixed = engine.prepared(kernel, dataclasses.replace(rest, **local))
        return work(Shard(inputs, fixed, ring, needs, tuple(specs.items())))

    return jax.vmap(of_rank, (split,), axis_name=AXIS, axis_size=call.ring)(arrays)
