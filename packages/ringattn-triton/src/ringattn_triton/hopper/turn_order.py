# SPDX-License-Identifier: Apache-2.0
"""In which order turns of the one-pass backward own tiles of keys, where each waits for those before it."""

from typing import Final

import numpy as np

from ..kernel_inputs import BlockConstants
from .schedules import PROGRAMS

_STEPS: Final = 8
"""How many query tiles a turn visits, at least, for each program that works on the same head beside it. With fewer it
waits too long: a simulation of the waits gives 1.2 of the steps at this bound under a causal mask, and two passes take
1.4 of the time."""


def queue_too_long(constants: BlockConstants, batch: int, q_tile: int) -> bool:
    """Whether turns would wait for each other so long that two passes are faster: few heads, and few queries."""
    heads = batch * constants.kv_heads
    return heads < PROGRAMS and -(-constants.q_length // q_tile) * heads < _STEPS * PROGRAMS


def order_of_keys(constants: BlockConstants, batch: int, rows: int) -> np.ndarray:
    """In which order turns own the `rows` tiles of keys, where they may add to a tile of dq in that order alone.

    All turns visit query tiles from the first to the last, and must not meet those that they wait for.

    Where keys are seen from near alone (windows, chunks, documents), the last keys go first: a turn begins ahead of
    those that went before it, and they are gone when it comes to the tiles that they share.

    Elsewhere (a causal mask) the first keys, which most queries see, must go first, or long turns would be left for the
    end. Turns that begin together would queue for their first tile, end together, and so on. Those of the very first
    keys are therefore spread over all tiles, the last of them first: they end one after the other.
    """
    every = np.arange(rows)
    if constants.below or constants.segments:
        return every[::-1]
    together = min(rows, max(1, round(PROGRAMS / (batch * constants.kv_heads))))
    spread = np.arange(together) * rows // together
    return np.concatenate([spread[::-1], np.setdiff1d(every, spread)])
