# SPDX-License-Identifier: Apache-2.0
"""What one score is: scale, soft cap, dropout probability, precision, and the tile sizes with which it is computed."""

import dataclasses
import math

from ..config import BwdParams, FwdParams


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one score is, in all blocks of a call: hashable and compared by value, so that one kernel serves all hops.

    A field at its default means that the call does not use the option.

    Args:
        softmax_scale: The factor of the products `q·k`; it has no default.
        logits_soft_cap: Scores become `cap * tanh(score / cap)`, before anything is added to them.
        dropout_prob: The probability of dropping an attention weight, rounded down to a multiple of 2^-16, because 16
            random bits decide.
        precision: The precision of float32 products, "default", "high" or "highest"; `None` asks for
            products as exact as sums in float32.
        fused_backward: The backward pass may add up gradients in any order, so results may differ from run to run.
        fwd_params: The tile sizes of the forward kernel.
        bwd_params: The tile sizes of the backward kernels.
        return_max_logits: The forward kernel also returns `Partial.max_logits`.
    """

    softmax_scale: float
    logits_soft_cap: float | None = None
    dropout_prob: float = 0.0
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
