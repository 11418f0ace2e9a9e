# SPDX-License-Identifier: Apache-2.0
"""Gives the ranks of a causal ring equal work although arrays are in contiguous order: ranks exchange half shards.

Rank `r` of `R` holds the chunks `2r` and `2r + 1` of `2R`. It keeps the first and swaps the second with rank
`R - 1 - r`, for chunk `2R - 1 - 2r`. As in the zigzag layout, each rank then holds a chunk and its mirror image, but
other ranks hold them. This is *folded* order (`Shards.folded`). `to_layout` would send both halves of each shard.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..contract.call import Call
from ..contract.varying import align
from ..placement import axes
from ..placement.arrays import LogSumExp, Output, letters
from .ulysses import axis_of


def folded(call: Call) -> Call:
    """The call in folded order (see the module): ranks swap half shards. With "all_gather", not those of keys."""
    axis = call.placement.roles.sequence
    wanted = ("T", "t") if call.placement.strategy == "all_gather" else ("T", "t", "S")
    tokens = {name: axis_of(call, name, x, wanted) for name, x in call.arrays.items()}
    moved: dict[str, Any] = {
        name: _swapped(getattr(call, name), n, axis) for name, n in tokens.items() if n is not None
    }
    if call.latents is not None and "S" in wanted:
        moved["latents"] = [_swapped(x, 1, axis) for x in call.latents]
    return dataclasses.replace(call, **moved).placed(layout="zigzag")


def unfolded(call: Call, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Moves `out` and `lse`, results of a call that `folded` made, to contiguous order."""
    out, lse = (
        _swapped(x, letters(kind).index("T"), call.placement.roles.sequence, back=True)
        for x, kind in ((out, Output), (lse, LogSumExp))
    )
    return out, lse


def _swapped(x: jax.Array, dim: int, axis: tuple[str, ...], back: bool = False) -> jax.Array:
    """Moves `x` along axis `dim` from contiguous to folded order, or `back`. Tokens of a shard increase in both."""
    ranks = axes.size(axis)
    if ranks == 1:
        return x
    keeps_first = 2 * axes.coordinate(axis) < ranks  # chunk 2r comes before its mirror image

    def in_order(kept: Any, other: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.where(keeps_first, kept, other), jnp.where(keeps_first, other, kept)

    kept, leaving = jnp.split(align(x, axes.tracked() & {*axis}), 2, dim)
    kept, leaving = in_order(kept, leaving) if back else (kept, leaving)
    arriving = axes.permuted(leaving, axis, [(rank, ranks - 1 - rank) for rank in range(ranks)])
    return jnp.concatenate([kept, arriving] if back else in_order(kept, arriving), dim)
