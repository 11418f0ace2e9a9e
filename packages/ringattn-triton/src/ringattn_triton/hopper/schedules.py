# SPDX-License-Identifier: Apache-2.0
"""How large the tiles of the Hopper kernels are, and how their warps share registers."""

import dataclasses
from typing import Final

import triton.language as tl

from ..kernel_inputs import BlockConstants

PROGRAMS: Final = 132
"""How many programs run at a time: one on each multiprocessor of the largest Hopper. Others find no work left."""
CONSUMER_ROWS: Final = tl.constexpr(64)
"""How many queries a consumer has: the rows of a warpgroup's product."""


@dataclasses.dataclass(frozen=True)
class HopperSchedule:
    """How a forward kernel runs; `ordered` lets one consumer multiply at a time."""

    consumers: int
    kv_tile: int
    stages: int
    ordered: bool
    registers_at_start: int
    """Registers of a thread when a program begins."""
    registers: int
    """Registers of a consumer's thread, which it takes over from the producer's."""

    @property
    def q_tile(self) -> int:
        return self.consumers * CONSUMER_ROWS.value


_FORWARD: Final = {
    (64, False): HopperSchedule(3, 128, 2, True, 128, 160),
    (128, False): HopperSchedule(2, 128, 2, False, 168, 240),
    (128, True): HopperSchedule(3, 64, 3, True, 128, 160),
}
"""By head size, and whether there is a soft cap: the fastest of those timed on an H200."""


def forward(constants: BlockConstants) -> HopperSchedule | None:
    """The schedule of the forward kernel, or `None` where there is no kernel for such heads."""
    return _FORWARD.get((constants.head_dim, constants.capped))
