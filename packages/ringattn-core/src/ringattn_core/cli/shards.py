# SPDX-License-Identifier: Apache-2.0
"""Traces a call to find what each rank holds and which of its tiles are visible."""

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
from ..ring.blocks import Ring, block, gathered
from ..ring.directions import Direction, Location
from .abstract_call import AXIS, AbstractCall

Specs = tuple[tuple[str, PartitionSpec], ...]
_TILE: Final = 128
_MOST_TILES: Final = 2**22
"""The default tile size grows until all ranks together have at most this number of tiles."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """The inputs of one rank as the ring engine gets them.

    `needs` are the features that the call needs of a backend; `specs` say how each of its arrays is split.
    """

    call: Call
    location: Location
    ring: Ring = dataclasses.field(metadata={"static": True})
    needs: frozenset[Feature] = dataclasses.field(metadata={"static": True})
    specs: Specs = dataclasses.field(metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys of one rank, padding included."""
        return self.call.query.shape[1], self.call.key.shape[1]

    @property
    def elements(self) -> int:
        """The number of elements of this rank's packed K,V."""
        return self.call.key.size + self.call.value.size


def trace(call: AbstractCall, work: Callable[[Call, Specs], Any]) -> Any:
    """The shapes of `work(local call, specs)`, stacked over the ranks. Traces `work`, and computes nothing."""
    return jax.eval_shape(functools.partial(_every_rank, call, work), call.integers())


def shard(call: AbstractCall, kernel: Any = None) -> Shard:
    """The shapes of one rank's inputs. The sends of the ring may depend on `kernel`."""
    stacked = trace(call, functools.partial(_shard, kernel))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def tile_states(call: AbstractCall, shard: Shard, offsets: Sequence[int], tile: tuple[int, int]) -> np.ndarray:
    """The state of each tile (`SKIPPED`, `MASKED`, `WHOLE`), `[ranks, offsets, q tiles, kv tiles]`.

    It is that of the first batch row; a tile is skipped only if no head sees any of it.
    """
    padded = [-(-length // size) * size for length, size in zip(shard.lengths, tile, strict=True)]

    def of_rank(local: Call, specs: Specs) -> jax.Array:
        shard = _shard(None, local, specs)
        direction = Direction(1, gathered(shard.ring, shard.call), shard.location)
        kv = packing.pack(shard.call.key, shard.call.value)

        def of_hop(offset: jax.Array) -> jax.Array:
            found = tiles(block(shard.ring, direction, kv, offset).padded_to(*padded), *tile)
            return found.some[0].astype(jnp.uint8) + found.full[0].astype(jnp.uint8)

        return jax.vmap(of_hop)(jnp.asarray(offsets, jnp.int32))

    # Only the shapes of the large arrays are read, so XLA under `jit` never allocates them.
    return np.asarray(jax.jit(functools.partial(_every_rank, call, of_rank))(call.integers()))


def default_tile(shard: Shard) -> tuple[int, int]:
    """A tile size for pictures: 128 by 128, larger for very long sequences, never longer than a shard."""
    tile = _TILE
    while math.prod(shard.ring.plan.ranks * -(-length // tile) for length in shard.lengths) > _MOST_TILES:
        tile *= 2
    return min(tile, shard.lengths[0]), min(tile, shard.lengths[1])


def _shard(kernel: Any, local: Call, specs: Specs) -> Shard:
    ring, call, location = engine.prepared(kernel, local)
    return Shard(call, location, ring, options.needs(local), specs)


def _every_rank(call: AbstractCall, work: Callable[[Call, Specs], Any], integers: dict[str, Any]) -> Any:
    """`work` on the local call of each rank, stacked. A `vmap` with the axis name takes the place of `shard_map`."""
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
