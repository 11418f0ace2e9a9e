# SPDX-License-Identifier: Apache-2.0
"""In which order turns of the one-pass backward own tiles of keys, where each waits for those before it."""

from typing import Final

from ..kernel_inputs import BlockConstants
from .schedules import PROGRAMS

_STEPS: Final = 8
"""How many query tiles a turn visits, at least, for each program that works on the same head beside it. With fewer it
waits too long: a simulation of the waits gives 1.3 of the steps at this bound under a causal mask, and two passes take
1.4 of the time."""


def queue_too_long(constants: BlockConstants, batch: int, q_tile: int) -> bool:
    """Whether turns would wait for each other so long that two passes are faster: few heads, and few queries."""
    heads = batch * constants.kv_heads
    return heads < PROGRAMS and -(-constants.q_length // q_tile) * heads < _STEPS * PROGRAMS


def last_keys_first(constants: BlockConstants) -> bool:
    """Whether turns own the last tiles of keys first, and visit queries from the first tile to the last.

    So they do in documents: a turn begins ahead of those before it, and they are gone when it comes to the tiles that
    they share. Elsewhere long turns would be left for the end, and turns on one head would be far apart, so that memory
    and not the cache would serve them. Turns then own the first tiles of keys first, visit queries from the last tile
    to the first, and follow each other at a distance of a step or two.
    """
    return constants.segments
