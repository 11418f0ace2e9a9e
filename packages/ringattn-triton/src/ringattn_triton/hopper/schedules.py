# SPDX-License-Identifier: Apache-2.0
"""The tile sizes of the forward kernel for Hopper, and how its warps share registers."""

import dataclasses
from typing import Final

import triton.language as tl

from ..kernel_inputs import BlockConstants
from .head_tiles import padded_size

PROGRAMS: Final = 132
"""The most programs of a launch: one for each multiprocessor of the largest Hopper GPU. On a smaller GPU the last
programs find no work."""
CONSUMER_ROWS: Final = tl.constexpr(64)
"""How many queries a consumer computes: the rows of a product of one warpgroup."""


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """Tile size, places and registers of the forward kernel, and how it runs.

    `stages`: places for key tiles. `ordered`: consumers begin their products one after another. `masked`: some tiles
    may need a mask. `fresh`: there is no partial result to continue. `bounded`: half of the soft cap, not the row
    maximum, is subtracted from scores. `stored`: the producer writes outputs by TMA, from shared memory; otherwise the
    consumers do, from registers.
    """

    consumers: int
    kv_tile: int
    stages: int
    ordered: bool
    registers_at_start: int
    """Registers of each thread when a program begins."""
    registers: int
    """Registers of a consumer's thread while the program runs: more than at the start, because the producer releases
    its own."""
    q_places: int = 2
    """Places for query tiles in shared memory. With two, the queries of the next turn are fetched early."""
    masked: bool = False
    fresh: bool = False
    bounded: bool = False
    stored: bool = False

    @property
    def q_tile(self) -> int:
        return self.consumers * CONSUMER_ROWS.value


_OF_256: Final = ForwardPlan(2, 64, 2, False, 168, 240, 1)
_FORWARD: Final = {
    (64, 64, False): ForwardPlan(3, 128, 2, True, 128, 160),
    (128, 128, False): ForwardPlan(2, 128, 2, True, 168, 240),
    (128, 128, True): ForwardPlan(3, 64, 3, True, 128, 160),
    (192, 128, False): ForwardPlan(2, 128, 2, True, 168, 240, 1),
    (192, 192, False): ForwardPlan(2, 128, 2, True, 168, 240, 1),
    (192, 256, False): _OF_256,
    (256, 128, False): ForwardPlan(2, 64, 3, False, 168, 240, 1),
    (256, 192, False): _OF_256,
    (256, 256, False): _OF_256,
}
"""The plans by head size of keys and of values (`padded_size`), and by whether there is a soft cap."""


_TWO_CONSUMERS: Final = ForwardPlan(2, 64, 3, False, 168, 240)
_WITH_DISTANCES: Final = {(128, 128, True): _TWO_CONSUMERS, (192, 192, False): _OF_256}
_WITH_DROPOUT: Final = {(64, 64, False): None, (128, 128, True): _TWO_CONSUMERS, (192, 192, False): _OF_256}
"""Plans that replace plans of `_FORWARD` in calls with distances (ALiBi) or dropout, which need registers that the
usual plan does not leave. `None`: there is no kernel."""


def forward(constants: BlockConstants) -> ForwardPlan | None:
    """The plan of the forward kernel, or `None` where the kernel does not take these head sizes and options."""
    if constants.head_dim < 64 or constants.head_dim % 8 or constants.value_dim % 8:
        return None
    head_size, value_size = (int(padded_size(dim)) for dim in (constants.head_dim, constants.value_dim))
    sizes = head_size, value_size, constants.capped
    usual = _FORWARD.get(sizes)
    if constants.dropout:
        return _WITH_DROPOUT.get(sizes, usual)
    return _WITH_DISTANCES.get(sizes, usual) if constants.distances else usual
