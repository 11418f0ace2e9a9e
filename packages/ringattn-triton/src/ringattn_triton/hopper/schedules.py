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
    """How a forward kernel runs; `ordered` lets one consumer at a time begin its products, but with segments."""

    consumers: int
    kv_tile: int
    stages: int
    ordered: bool
    registers_at_start: int
    """Registers of a thread when a program begins."""
    registers: int
    """Registers of a consumer's thread, which it takes over from the producer's."""
    q_places: int = 2
    """Tiles of queries in shared memory: with two, those of the next turn come early."""

    @property
    def q_tile(self) -> int:
        return self.consumers * CONSUMER_ROWS.value


_FORWARD: Final = {
    (64, 64, False): HopperSchedule(3, 128, 2, True, 128, 160),
    (128, 128, False): HopperSchedule(2, 128, 2, True, 168, 240),
    (128, 128, True): HopperSchedule(3, 64, 3, True, 128, 160),
    (256, 128, False): HopperSchedule(2, 64, 3, False, 168, 240, 1),
    (256, 256, False): HopperSchedule(2, 64, 2, False, 168, 240, 1),
}
"""By the sizes of keys and values, filled up to powers of two, and whether there is a soft cap."""


_WITH_MORE: Final = {
    (64, 64, False): None,
    (128, 128, True): HopperSchedule(2, 64, 3, False, 168, 240),
}
"""The same where dropout or ALiBi need registers, which three consumers do not have. Heads of 64 were 4 times as slow
with dropout, and with two consumers they have not been timed."""


def forward(constants: BlockConstants) -> HopperSchedule | None:
    """The schedule of the forward kernel, or `None` where there is no kernel for such heads."""
    if constants.head_dim < 64 or constants.head_dim % 8 or constants.value_dim % 8:
        return None
    sizes = constants.padded_head_dim, constants.padded_value_dim, constants.capped
    usual = _FORWARD.get(sizes)
    return _WITH_MORE.get(sizes, usual) if constants.dropout or constants.slopes else usual
