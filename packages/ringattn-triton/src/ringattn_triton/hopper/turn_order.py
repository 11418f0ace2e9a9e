# SPDX-License-Identifier: Apache-2.0
"""In which order turns of the one-pass backward own tiles of keys, where each waits for those before it."""

from typing import Final

from ..kernel_inputs import BlockConstants
from .backward_plan import BackwardPlan
from .schedules import PROGRAMS

_STEPS: Final = 8
"""How many query tiles a turn visits, at least, for each program that works on the same head beside it. With fewer it
waits too long: a simulation of the waits gives 1.3 of the steps at this bound under a causal mask, and two passes take
1.4 of the time."""
_WIDE_STEPS: Final = 2
"""The same for wide heads, of which two passes take 2.2 of the time."""


def queue_too_long(constants: BlockConstants, batch: int, plan: BackwardPlan) -> bool:
    """Whether turns would wait for each other so long that two passes are faster: few heads, and few queries."""
    heads = batch * constants.kv_heads
    steps = _WIDE_STEPS if plan.wide else _STEPS
    return heads < PROGRAMS and -(-constants.q_length // plan.q_tile) * heads < steps * PROGRAMS


def last_keys_first(constants: BlockConstants) -> bool:
    """Whether turns own the last tiles of keys first, and visit queries from the first tile to the last.

    So they do in documents: a turn begins ahead of those before it, and they are gone when it comes to the tiles that
    they share. Elsewhere long turns would be left for the end, and turns on one head would be far apart, so that memory
    and not the cache would serve them. Turns then own the first tiles of keys first, visit queries from the last tile
    to the first, and follow each other at a distance of a step or two.
    """
    return constants.segments
