# SPDX-License-Identifier: Apache-2.0
"""How large the tiles of the one-pass backward kernel are, how many places they have, and how turns are ordered."""

import dataclasses
from typing import Final

from ..kernel_inputs import power_of_two
from .schedules import PROGRAMS


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """How the kernel runs.

    `masked`: there are tiles to mask. `ordered`: turns add to dq in the order of their numbers, so that bits repeat.
    `side_by_side`: how many key tiles of a head run at a time where turns are ordered, else 1.
    """

    q_tile: int
    masked: bool = False
    ordered: bool = False
    side_by_side: int = 1
    kv_tile: int = 128
    stages: int = 2
    ds_places: int = 2
    dq_places: int = 1
    registers: int = 240
    """Registers of a consumer's thread, which it takes over from the other warps'."""

    @property
    def barriers(self) -> int:
        """Room for those in `backward_memory.shared_places`; Triton wants a power of two."""
        return power_of_two(6 + 4 * self.stages + self.ds_places + 4 * self.dq_places)

    def of_block(self, masked: bool, ordered: bool, together: int) -> "BackwardPlan":
        """The plan for a block whose heads go so many together."""
        side_by_side = -(-PROGRAMS // together) if ordered else 1
        return dataclasses.replace(self, masked=masked, ordered=ordered, side_by_side=side_by_side)


PLANS: Final = {64: BackwardPlan(q_tile=128), 128: BackwardPlan(q_tile=64)}
"""By head size. The accumulators of a step, 240 registers of two groups of four warps, allow no larger tiles."""
