# SPDX-License-Identifier: Apache-2.0
"""The static part of a call: masks, scale, dropout probability and tile sizes."""

import dataclasses
import math

from ..config import BwdParams, FwdParams
from ..masks import Mask


@dataclasses.dataclass(frozen=True)
class Rule:
    """The static half of a `Block`: hashable and compared by value, so that one kernel serves all hops.

    A field at its default means that the call does not use the option.

    Args:
        softmax_scale: The factor of the products `q·k`; it has no default.
        causal: A query sees no key at a later position.
        sliding_window: `(left, right)`, how far a query sees to each side, both ends inclusive; `None` is unbounded.
            A side is at least 0 and may be as large as 2^31 - 1.
        chunk_size: A query sees the keys of its own chunk of this many positions, none after itself; at most 2^30.
        logits_soft_cap: Scores become `cap * tanh(score / cap)`, before anything is added to them.
        dropout_prob: The probability of dropping an attention weight, rounded down to a multiple of 2^-16, because 16
            random bits decide.
        masks: The distinct masks that the call's `mask_builder` made; empty without a builder.
        mask_of_head: For each *global* head, the number of its mask in `masks`.
        increasing: Positions grow within each shard, so that visible tiles form ranges, and the first and the last
            token of a tile bound its positions.
        precision: The precision of float32 products, "default", "high" or "highest"; `None` asks for
            products as exact as sums in float32.
        fused_backward: The backward pass may add up gradients in any order, so results may differ from run to run.
        fwd_params: The tile sizes of the forward kernel.
        bwd_params: The tile sizes of the backward kernels.
        return_max_logits: The forward kernel also returns `Partial.max_logits`.
    """

    softmax_scale: float
    causal: bool = False
    sliding_window: tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    dropout_prob: float = 0.0
    masks: tuple[Mask, ...] = ()
    mask_of_head: tuple[int, ...] = ()
    increasing: bool = True
    precision: str | None = None
    fused_backward: bool = False
    fwd_params: FwdParams = FwdParams()
    bwd_params: BwdParams = BwdParams()
    return_max_logits: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dropout_prob", math.floor(self.dropout_prob * 2**16) / 2**16)

    @property
    def keep_weight(self) -> float:
        """`1 / (1 - dropout_prob)`, the factor of the probabilities that dropout keeps."""
        return 1.0 / (1.0 - self.dropout_prob)
