# SPDX-License-Identifier: Apache-2.0
"""Which pairs of tiles a kernel may skip, and which need no mask."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..masks import Coordinates, all_of, same_segment
from ..masks.algebra import tiles_of
from .protocol import Block
from .rule import Rule
from .visibility import bounds


class Tiles(NamedTuple):
    """For each query tile and key tile: `some`, whether any head may see any pair; `full`, whether all heads see all.

    A kernel may skip a tile where `some` is false, and needs no mask where `full` is true. Both are conservative:
    `some` may be true where nothing is visible, `full` may be false where every pair is. `full` implies `some`. `g` is
    1 if nothing depends on the batch row, else `B`.
    """

    some: Bool[Array, "g nq nk"]
    full: Bool[Array, "g nq nk"]


def tiles(block: Block, q_tile: int, kv_tile: int) -> Tiles:
    """The tiles of `block`, of `q_tile` queries by `kv_tile` keys; these divide its lengths (see `Block.padded_to`).

    Exact for a causal mask, and for a window or chunks over consecutive positions. With several masks, the bounds of
    each are ANDed. A mask that is not `bounded` is evaluated pair by pair, a row of tiles at a time.
    """
    rule = block.rule
    padding = _by_tile(block.kv_index < 0, kv_tile) if block.padded else None
    q = Coordinates(_by_tile(block.q_positions, q_tile), _by_tile(block.q_index, q_tile))
    kv = Coordinates(*(_unpadded(_by_tile(x, kv_tile), padding) for x in (block.kv_positions, block.kv_index)))
    if rule.increasing:  # with padding too: `padded_to` repeats the last position
        parts = by_position(rule, _ends(block.q_positions, q_tile), _ends(block.kv_positions, kv_tile))
    else:
        parts = by_position(rule, *((x.positions.min(-1), x.positions.max(-1)) for x in (q, kv)))
    if block.q_segments is not None and block.kv_segments is not None:
        kv_ids = _unpadded(_by_tile(block.kv_segments, kv_tile), padding)
        parts.append(same_segment(_by_tile(block.q_segments, q_tile), kv_ids))
    if rule.masks:
        parts.append(tiles_of(rule.masks, q, kv))
    if block.mask is not None:
        parts.append(_of_dense(block.mask, q_tile, kv_tile))
    if padding is not None:
        parts.append((~padding.all(-1)[:, None, :], ~padding.any(-1)[:, None, :]))
    grid = jnp.ones((1, block.q_length // q_tile, block.kv_length // kv_tile), bool)
    some, full = (all_of(part) for part in zip((grid, grid), *parts, strict=True))
    return Tiles(*jnp.broadcast_arrays(some, full))


def by_position(rule: Rule, q: Any, kv: Any) -> list[tuple[Any, Any]]:
    """Pairs `(some, full)` as in `Tiles`, one for each bound of causality, window and chunk; `tiles` ANDs them.

    `q` and `kv` are pairs of arrays, `[g, nq]` and `[g, nk]`: the least and the greatest position of each tile.
    """
    (low, high_of_all), (low_of_all, high) = (bounds(rule, x[..., None]) for x in q)
    first, last = (x[..., None, :] for x in kv)
    parts = [] if low is None else [(last >= low, first >= low_of_all)]
    return parts if high is None else [*parts, (first <= high, last <= high_of_all)]


def near_equal(length: int, longest: int, multiple: int = 1) -> int:
    """The tile size that cuts `length` into the fewest tiles of at most `longest`, all nearly equal.

    It is rounded up to a multiple of `multiple`, which must divide `longest`.
    """
    count = -(-length // longest)
    return -(-length // (count * multiple)) * multiple


def _by_tile(x: jax.Array, tile: int) -> jax.Array:
    return x.reshape(x.shape[0], -1, tile)


def _ends(positions: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last position of each tile."""
    by_tile = _by_tile(positions, tile)
    return by_tile[..., 0], by_tile[..., -1]


def _unpadded(x: jax.Array, padding: jax.Array | None) -> jax.Array:
    """Gives padding keys the value of the first key of their tile, so that they do not widen the tile's bounds."""
    return x if padding is None else jnp.where(padding, x[..., :1], x)


def _of_dense(mask: jax.Array, q_tile: int, kv_tile: int) -> tuple[jax.Array, jax.Array]:
    batch, heads, rows, columns = mask.shape
    grid = mask.reshape(batch, heads, rows // q_tile, q_tile, columns // kv_tile, kv_tile)
    return grid.any((1, 3, 5)), grid.all((1, 3, 5))
