# SPDX-License-Identifier: Apache-2.0
"""How a block is cut into tiles, and how much of a tile is computed at a time."""

import dataclasses
from typing import Any, Final

import jax.numpy as jnp
from ringattn_core import BwdParams, FwdParams
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.tiles import near_equal
from ringattn_core.errors import InputError

from . import steps

LANES: Final = 128
"""The lanes of a vector register. Tile lengths are multiples of it, because visiting tiles lie along the lanes."""
SUBLANES: Final = 8
_LONGEST: Final = 1024
_SHORTEST: Final = 256


@dataclasses.dataclass(frozen=True)
class Sizes:
    """In tokens: the tile sizes, the padded lengths, and the part of a visiting tile that is computed at a time.

    `part` is `None` where the caller leaves it open.
    """

    q_tile: int
    kv_tile: int
    q_length: int
    kv_length: int
    part: int | None

    def part_of(self, visiting_tile: int, default: int) -> int:
        """How much of a visiting tile to compute at a time: at most `part`, or `default`, and a divisor of the tile."""
        most = min(self.part or default, visiting_tile)
        return next(n for n in range(most, 0, -LANES) if visiting_tile % n == 0)


def choose(block: Block, params: FwdParams | BwdParams) -> Sizes:
    """The sizes that `params` asks for, and a choice for each size that it leaves open.

    Tiles are long, so that the pipeline hides its transfers behind products, but no longer than half of what a window
    lets a query see; near equal, so that padding wastes little; and so few that the list of steps has room.
    """
    wide = block.q.dtype == jnp.float32 or max(block.q.shape[-1], block.value_dim) > LANES
    seen = block.reach.span // 2 // LANES * LANES
    target = max(_SHORTEST, min(_LONGEST // 2 if wide else _LONGEST, seen))
    asked = (params.q_blocksize, params.kv_blocksize)
    while True:
        q_tile, q_length = cut(block.q_length, _rounded(asked[0] or target))
        kv_tile, kv_length = cut(block.kv_length, _rounded(asked[1] or target))
        if steps.fits(block.q.shape[0], q_length // q_tile, kv_length // kv_tile):
            return Sizes(q_tile, kv_tile, q_length, kv_length, _part(dict(params.extra).get("part")))
        if all(asked) or target > max(q_length, kv_length):
            raise InputError(
                "fwd_params.q_blocksize, kv_blocksize",
                f"tiles of {q_tile} and {kv_tile} make more than {steps.MOST_STEPS} steps of {block.q.shape[0]} x "
                f"{block.q_length} queries and {block.kv_length} keys, and the scalar memory of a TPU holds no more",
                "Ask for longer tiles, or let the backend choose",
            )
        target *= 2


def _part(asked: Any) -> int | None:
    if asked is None:
        return None
    if not isinstance(asked, int) or asked < 1:
        raise InputError('extra={"part": ...}', f"got {asked!r}", "Pass a number of tokens, or leave it out")
    return _rounded(asked)


def _rounded(size: int) -> int:
    return -(-size // LANES) * LANES


def cut(length: int, longest: int) -> tuple[int, int]:
    """`(tile, padded length)`: `length` cut into the fewest near-equal tiles of at most `longest` tokens."""
    tile = near_equal(length, longest, LANES)
    return tile, -(-length // tile) * tile
