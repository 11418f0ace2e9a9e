# SPDX-License-Identifier: Apache-2.0
"""Traces a call to find what each rank holds and which of its tiles are visible."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core.call import options, sharding
from ringattn_core.call.validation import validated
from ringattn_core.contract.call import Call
from ringattn_core.contract.tiles import tiles
from ringattn_core.errors import InputError

from .abstract_call import AXIS, AbstractCall
from .engine import own_block

_TILE: Final = 128
_MANY_TILES, _MOST_TILES = 2**22, 2**26
"""The default tile size grows until all ranks together have at most `_MANY_TILES` tiles. A size with more than
`_MOST_TILES` tiles raises."""


def trace(call: AbstractCall, work: Callable[[Call], Any]) -> Any:
    """The shapes of what `work` returns for the call of each rank, stacked along a first axis over the ranks.

    Traces `work` once, and computes nothing.
    """
    return jax.eval_shape(functools.partial(_every_rank, call, work), call.integers)


def local_call(call: AbstractCall) -> Call:
    """The call of one rank as the ring engine gets it, in shapes only, padding included."""
    stacked = trace(call, lambda local: local)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def tile_states(call: AbstractCall, lengths: tuple[int, int], tile: tuple[int, int]) -> np.ndarray:
    """The state of each tile (`SKIPPED`, `MASKED`, `WHOLE`), `[ranks, q tiles, ranks of the keys, kv tiles]`.

    `lengths` are as in `tile_size`. The states are those of the first batch row. A tile is `SKIPPED` only if no head
    sees any of its pairs.
    """
    q_length, kv_length = (-(-length // size) * size for length, size in zip(lengths, tile, strict=True))

    def of_rank(local: Call) -> jax.Array:
        own = own_block(local).padded_to(q_length, kv_length)

        def of_all_ranks(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.all_gather(x, AXIS, axis=axis, tiled=True)

        visible = tiles(own.map_keys(of_all_ranks), *tile)
        states = visible.some[0].astype(jnp.uint8) + visible.full[0].astype(jnp.uint8)
        return states.reshape(q_length // tile[0], call.ring, kv_length // tile[1])

    # Only the shapes of the large arrays are read, so XLA under `jit` never allocates them.
    return np.asarray(jax.jit(functools.partial(_every_rank, call, of_rank))(call.integers))


def tile_size(lengths: tuple[int, int], ranks: int, asked: tuple[int, int] | None) -> tuple[int, int]:
    """The queries and keys of a tile: as `asked`; else 128 by 128, or more for very long sequences. At most a shard.

    `lengths` are the numbers of queries and keys of a shard.
    """
    size = asked or (_TILE, _TILE)
    if min(size) < 1:
        raise InputError("--tile", f"got {size[0]},{size[1]}", "Pass positive lengths of queries and keys")

    def count() -> int:
        return math.prod(ranks * -(-length // tile) for length, tile in zip(lengths, size, strict=True))

    while asked is None and min(size) < max(lengths) and count() > _MANY_TILES:
        size = (2 * size[0], 2 * size[1])
    if count() > _MOST_TILES:
        raise InputError("--tile", f"{size[0]},{size[1]} makes {count()} tiles", f"At most {_MOST_TILES} can be shown")
    return min(size[0], lengths[0]), min(size[1], lengths[1])


def _every_rank(call: AbstractCall, work: Callable[[Call], Any], integers: dict[str, Any]) -> Any:
    """Calls `work` with the call of each rank; stacks the results. A `vmap` with the axis name replaces `shard_map`."""
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in call.floating.items()}
    whole, roles = sharding.prepared(validated(**zeros, **integers, **call.options, ranks=1), call.mesh)
    arrays, split = {}, {}
    for name, spec in sharding.specs(whole, roles).items():
        x, axis = getattr(whole, name), spec.index(AXIS) if AXIS in spec else None
        split[name] = axis
        arrays[name] = x if axis is None else x.reshape(*x.shape[:axis], call.ring, -1, *x.shape[axis + 1 :])
    rest = dataclasses.replace(whole, **dict.fromkeys(options.ARRAYS))

    def of_rank(local: dict[str, jax.Array]) -> Any:
        return work(dataclasses.replace(rest, **local))

    return jax.vmap(of_rank, (split,), axis_name=AXIS, axis_size=call.ring)(arrays)
