# SPDX-License-Identifier: Apache-2.0
"""What is the same for every score of a call and known when the program is traced."""

import dataclasses
import math

from ..config import BwdParams, FwdParams
from ..masks import Mask


@dataclasses.dataclass(frozen=True)
class Rule:
    """The static half of a `Block`: hashable, and equal when equal, so that one kernel serves all hops.

    `masks` are the distinct masks that `mask_builder` made, `mask_of_head` says which one each *global* head
    obeys (empty where there are none); `window` is `(left, right)`, both inclusive, `None` for unbounded.
    `increasing` promises that positions grow within each shard, so that visible tiles form ranges.
    `dropout` is rounded down to a multiple of 2^-16, the resolution of its random bits.
    """

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    masks: tuple[Mask, ...] = ()
    mask_of_head: tuple[int, ...] = ()
    increasing: bool = True
    precision: str | None = None
    fused_backward: bool = False
    fwd_params: FwdParams = FwdParams()
    bwd_params: BwdParams = BwdParams()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dropout", math.floor(self.dropout * 2**16) / 2**16)
