# SPDX-License-Identifier: Apache-2.0
"""Which pairs of tiles a kernel may skip, and which need no mask."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..masks import Coordinates, all_of, same_segment
from ..masks.algebra import tiles_of
from .protocol import Block
from .visibility import position_masks


class Tiles(NamedTuple):
    """For each query tile and key tile: `some`, whether any head may see any pair; `full`, whether all heads see all.

    A kernel may skip a tile that is not `some`, and needs no mask for a tile that is `full`. Both are conservative:
    `some` may be true for an invisible tile, `full` may be false for a visible one. `full` implies `some`. `g` is 1
    where nothing depends on the batch, else `B`.
    """

    some: Bool[Array, "g nq nk"]
    full: Bool[Array, "g nq nk"]


def tiles(block: Block, q_tile: int, kv_tile: int) -> Tiles:
    """The tiles of `block`, of `q_tile` queries by `kv_tile` keys; these divide its lengths (see `Block.padded_to`).

    Exact for a causal mask, and for a window or chunks over consecutive positions. With several masks, the bounds of
    each are ANDed. A mask without bounds is evaluated, a row of tiles at a time.
    """
    rule = block.rule
    padding = _by_tile(block.kv_index < 0, kv_tile) if block.padded else None
    q = Coordinates(_by_tile(block.q_positions, q_tile), _by_tile(block.q_index, q_tile))
    kv = Coordinates(*(_unpadded(_by_tile(x, kv_tile), padding) for x in (block.kv_positions, block.kv_index)))
    # `padded_to` repeats the last position, so the ends of a tile bound its positions with padding too.
    ends = (_ends(block.q_positions, q_tile), _ends(block.kv_positions, kv_tile)) if rule.increasing else (q, kv)
    parts = [mask.tiles(*ends) for mask in position_masks(rule)]
    if block.q_segments is not None and block.kv_segments is not None:
        kv_ids = _unpadded(_by_tile(block.kv_segments, kv_tile), padding)
        parts.append(same_segment(_by_tile(block.q_segments, q_tile), kv_ids))
    if rule.masks:
        parts.append(tiles_of(rule.masks, q, kv))
    if block.mask is not None:
        parts.append(_of_dense(block.mask, q_tile, kv_tile))
    if padding is not None:
        parts.append((~padding.all(-1)[:, None, :], ~padding.any(-1)[:, None, :]))
    count = (block.q_length // q_tile, block.kv_length // kv_tile)
    if not parts:
        full = jnp.ones((1, *count), bool)
        return Tiles(full, full)
    some, full = all_of(some for some, _ in parts), all_of(full for _, full in parts)
    shape = (max(some.shape[0], full.shape[0]), *count)
    return Tiles(jnp.broadcast_to(some, shape), jnp.broadcast_to(full, shape))


def near_equal(length: int, longest: int, multiple: int = 1) -> int:
    """The tile size that cuts `length` into the fewest tiles of at most `longest`, all nearly equal.

    It is rounded up to a multiple of `multiple`, which must divide `longest`.
    """
    count = -(-length // longest)
    return -(-length // (count * multiple)) * multiple


def _by_tile(x: jax.Array, tile: int) -> jax.Array:
    return x.reshape(x.shape[0], -1, tile)


def _ends(positions: jax.Array, tile: int) -> Coordinates:
    """The first and the last position of each tile, also as its index: no mask in `position_masks` reads that."""
    first_and_last = _by_tile(positions, tile)[..., :: max(tile - 1, 1)]
    return Coordinates(first_and_last, first_and_last)


def _unpadded(x: jax.Array, padding: jax.Array | None) -> jax.Array:
    """Gives padding keys the value of the first key of their tile, so that they do not widen the tile's bounds."""
    return x if padding is None else jnp.where(padding, x[..., :1], x)


def _of_dense(mask: jax.Array, q_tile: int, kv_tile: int) -> tuple[jax.Array, jax.Array]:
    batch, heads, rows, columns = mask.shape
    grid = mask.reshape(batch, heads, rows // q_tile, q_tile, columns // kv_tile, kv_tile)
    return grid.any((1, 3, 5)), grid.all((1, 3, 5))
