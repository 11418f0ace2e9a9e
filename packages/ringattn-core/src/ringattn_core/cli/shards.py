# SPDX-License-Identifier: Apache-2.0
"""What each rank of a call holds, and which of its tiles are visible: found by tracing the call."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..call import options, sharding
from ..call.validation import validated
from ..contract import packing
from ..contract.call import Call
from ..contract.features import Feature
from ..contract.tiles import tiles
from ..ring import engine
from ..ring.blocks import Differentiable, Fixed, Ring, block, gathered
from .abstract_call import AXIS, AbstractCall

Specs = tuple[tuple[str, PartitionSpec], ...]
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
    specs: Specs = dataclasses.field(metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, int]:
        """The queries and the keys of one rank, padding included."""
        return self.inputs.q.shape[1], self.inputs.k.shape[1]

    @property
    def elements(self) -> int:
        """The number of elements of this rank's packed K,V."""
        return self.inputs.k.size + self.inputs.v.size


def trace(call: AbstractCall, work: Callable[[Call, Specs], Any]) -> Any:
    """The shapes of `work(call of one rank, specs of the arrays)` for every rank, stacked; computes nothing."""
    return jax.eval_shape(functools.partial(_every_rank, call, work), call.integers())


def shard(call: AbstractCall, kernel: Any = None) -> Shard:
    """The shapes of one rank's inputs. `kernel` may change what the ring sends."""
    stacked = trace(call, functools.partial(_shard, kernel))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def tile_states(call: AbstractCall, shard: Shard, offsets: Sequence[int], tile: tuple[int, int]) -> np.ndarray:
    """0 where a tile is skipped, 1 where it is masked, 2 where it is whole: `[ranks, offsets, q tiles, kv tiles]`.

    Computed for the first row of the batch; a tile counts as visible if any head sees it.
    """
    padded = [-(-length // size) * size for length, size in zip(shard.lengths, tile, strict=True)]

    def of_rank(local: Call, specs: Specs) -> jax.Array:
        shard = _shard(None, local, specs)
        fixed, kv = gathered(shard.ring, shard.fixed), packing.pack(shard.inputs.k, shard.inputs.v)

        def of_hop(offset: jax.Array) -> jax.Array:
            found = tiles(block(shard.ring, shard.inputs, kv, fixed, offset).padded_to(*padded), *tile)
            return found.some[0].astype(jnp.uint8) + found.full[0].astype(jnp.uint8)

        return jax.vmap(of_hop)(jnp.asarray(offsets, jnp.int32))

    # Under `jit` XLA drops the large arrays, of which only the shapes are read.
    return np.asarray(jax.jit(functools.partial(_every_rank, call, of_rank))(call.integers()))


def default_tile(shard: Shard) -> tuple[int, int]:
    """128 by 128, larger for very long sequences, and never longer than a shard."""
    tile = _TILE
    while math.prod(shard.ring.plan.ranks * -(-length // tile) for length in shard.lengths) > _MOST_TILES:
        tile *= 2
    return min(tile, shard.lengths[0]), min(tile, shard.lengths[1])


def _shard(kernel: Any, local: Call, specs: Specs) -> Shard:
    ring, inputs, fixed = engine.prepared(kernel, local)
    return Shard(inputs, fixed, ring, options.needs(local), specs)


def _every_rank(call: AbstractCall, work: Callable[[Call, Specs], Any], integers: dict[str, Any]) -> Any:
    """`work` on the call of each rank, stacked: `vmap` stands for the ranks, as `shard_map` would on devices."""
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in call.floating().items()}
    whole, roles = sharding.prepared(validated(**zeros, **integers, **call.options(), ranks=1), call.mesh)
    specs = tuple(sharding.specs(whole, roles).items())
    arrays, split = {}, {}
    for name, spec in specs:
        x = getattr(whole, name)
        axis = next((number for number, entry in enumerate(spec) if entry == AXIS), None)
        arrays[name], split[name] = x, axis
        if axis is not None:
            arrays[name] = x.reshape(*x.shape[:axis], call.ring, -1, *x.shape[axis + 1 :])
    rest = dataclasses.replace(whole, **dict.fromkeys(options.ARRAYS))

    def of_rank(local: dict[str, jax.Array]) -> Any:
        return work(dataclasses.replace(rest, **local), specs)

    return jax.vmap(of_rank, (split,), axis_name=AXIS, axis_size=call.ring)(arrays)
