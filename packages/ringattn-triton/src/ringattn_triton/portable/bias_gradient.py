# SPDX-License-Identifier: Apache-2.0
"""Computes the gradient of the bias from `ds`, the gradient of the scores, one strip of `ds` at a time.

A strip is a range of query tiles (in `hopper.backward`, of key tiles) for all heads. These tiles are called its own
tiles. The backward kernel stores `ds` of one strip, in the dtype of the inputs, and the kernel `bias_sums` adds it up.
Computing `ds` again for each tile of the bias would take longer: it would read all queries, keys and values again.
"""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int8, Int32
from ringattn_core.contract import ordering
from ringattn_core.contract.protocol import Block

from ..launch import launch
from ..visited_tiles import ENOUGH_PROGRAMS, heads_at_once
from .bias_sums_kernel import bias_sums

PROGRAMS_PER_STRIP: Final = 264
"""How many programs a strip should have at most: two for each multiprocessor of the largest Hopper GPU."""
MOST_STRIPS: Final = 16
"""The most strips of a block: more launches would cost more time than the memory that they save is worth."""


@dataclasses.dataclass(frozen=True)
class Strips:
    """The size of a strip: `rows` own tiles of each of `heads` query heads, by all `columns` tiles of the other side.

    In the kernel that computes `ds`, `heads_at_once` heads run side by side; `bias_sums` reads the other fields only.
    """

    rows: int
    heads_at_once: int
    heads: int
    columns: int


def strips(block: Block, rows: int, columns: int) -> Strips:
    """The size of the strips for a block of `rows` query tiles by `columns` key tiles."""
    batch, _, heads, _ = block.q.shape
    rows = min(max(PROGRAMS_PER_STRIP // (batch * heads), -(-rows // MOST_STRIPS), 1), rows)
    return Strips(rows, heads_at_once(rows, heads, ENOUGH_PROGRAMS), heads, columns)


def first_tile(number: int, token: jax.Array | None) -> Int32[Array, " 1"]:
    """The number of a strip's first tile, as an array that depends on `token`.

    `token` is an array that the previous strip computes, or `None` in the first strip. So a strip starts only when the
    previous strip is summed, and only one strip at a time is in memory.
    """
    tile = jnp.full((1,), number, jnp.int32)
    return tile if token is None else ordering.tie(tile, token)


def summed(
    block: Block,
    ds: jax.Array,
    seen: Int8[Array, "g rows columns"],
    first: Int32[Array, " 1"],
    before: jax.Array | None,
    of: Strips,
    tiles: tuple[int, int],
    by_keys: bool = False,
) -> jax.Array:
    """The gradient of the bias over all strips so far: this strip's `ds`, and `before` over the earlier strips.

    `before` is `None` in the first strip. `ds` and `first` are the gradients of scores and the number of the first tile
    of this strip, `seen` says which tiles of the block are visible, and `tiles` is how many queries and keys a tile
    has. `by_keys`: strips are ranges of key tiles. Then the rows of `seen` and of each tile of `ds` are keys, and the
    bias must have a row for each query.
    """
    assert block.bias is not None
    batch, heads, length, _ = block.bias.shape
    summed_rows = length == 1
    own_rows, row_sums = (1, of.rows) if summed_rows else (of.rows, 1)
    dtype = block.bias.dtype if block.final and not summed_rows else jnp.float32
    (dbias,) = launch(
        bias_sums,
        [ds, seen, first, before],
        [jax.ShapeDtypeStruct(block.bias.shape, dtype)],
        grid=(batch * heads * own_rows * of.columns,),
        aliases={} if before is None else {3: 0},
        name="ringattn_bias_sums",
        S=of,
        ROWS=seen.shape[1],
        GROUPED=seen.shape[0] > 1,
        HEADS=heads,
        OWN_ROWS=own_rows,
        BATCH_SUMS=block.q.shape[0] // batch,
        HEAD_SUMS=of.heads // heads,
        ROW_SUMS=row_sums,
        SUMMED_ROWS=summed_rows,
        FRESH=before is None,
        Q_LENGTH=block.q_length,
        KV_LENGTH=block.kv_length,
        Q_TILE=tiles[0],
        KV_TILE=tiles[1],
        BY_KEYS=by_keys,
    )
    return dbias
