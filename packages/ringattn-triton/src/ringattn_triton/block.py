# SPDX-License-Identifier: Apache-2.0
"""The block kernel that core drives: forward and backward by Triton, each traced once for all hops of a ring."""

from typing import Final

from jaxtyping import Array, Float, Float32
from ringattn_core.contract.protocol import Block, Gradients, Partial

from . import candidates, hopper, packing, schedules
from .backward import backward
from .forward import forward
from .rows import rows


class TritonKernel:
    """Blockwise attention on GPUs: every feature, heads of up to 256, the same bits at every run."""

    any_queries = True
    finishes = True
    keys_and_values = staticmethod(packing.keys_and_values)
    counts = hopper.COUNTS
    rows = staticmethod(rows)
    candidate_configs = staticmethod(candidates.candidate_configs)

    def forward(self, block: Block, partial: Partial) -> Partial:
        return forward(block, partial, schedules.target())

    def backward(
        self,
        block: Block,
        dout: Float[Array, "B T N Hv"],
        lse: Float32[Array, "B N T"],
        delta: Float32[Array, "B N T"],
        dq: Float32[Array, "B T N H"] | None,
    ) -> Gradients:
        return backward(block, dout, lse, delta, dq, schedules.target())


KERNEL: Final = TritonKernel()
