# SPDX-License-Identifier: Apache-2.0
"""How large the tiles of the one-pass backward kernel are, and how many places they have in shared memory."""

import dataclasses
from typing import Final

from ..kernel_inputs import power_of_two


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """How the kernel runs.

    `masked`: there are tiles to mask. `ordered`: turns add to dq in the order of their numbers, so that bits repeat.
    `last_first`: as `turn_order.last_keys_first`.
    """

    q_tile: int
    masked: bool = False
    ordered: bool = False
    last_first: bool = False
    kv_tile: int = 128
    stages: int = 2
    ds_places: int = 2
    dq_places: int = 1
    writers: int = 2
    """Warps that add dq to memory, in turn: an addition in order takes about as long as a step."""
    registers: int = 240
    """Registers of a consumer's thread, which it takes over from the other warps'."""

    @property
    def barriers(self) -> int:
        """Room for those in `backward_memory.shared_places`; Triton wants a power of two."""
        return power_of_two(6 + 4 * self.stages + self.ds_places + 2 * self.dq_places + 2 * self.writers)


PLANS: Final = {64: BackwardPlan(q_tile=128), 128: BackwardPlan(q_tile=64)}
"""By head size. The accumulators of a step, 240 registers of two groups of four warps, allow no larger tiles."""
