# SPDX-License-Identifier: Apache-2.0
"""The block kernel that core drives: forward and backward by Pallas, each traced once for all hops of a ring."""

from typing import Final

from jaxtyping import Array, Float, Float32
from ringattn_core.contract.protocol import Block, Gradients, Partial

from . import candidates
from .backward import backward
from .forward import forward
from .ordering import tie


class TpuKernel:
    """Blockwise attention on TPUs: every feature but float16, heads of up to 256, the same bits at every run."""

    # XLA on a TPU keeps several permutes in flight, and takes long to pack arrays of different dtypes into one.
    separate_sends = True
    tie = staticmethod(tie)
    candidate_configs = staticmethod(candidates.candidate_configs)

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        return forward(block, partial)

    def backward(
        self,
        block: Block,
        dout: Float[Array, "B T N Hv"],
        lse: Float32[Array, "B N T"],
        delta: Float32[Array, "B N T"],
        dq: Float32[Array, "B T N H"] | None,
    ) -> Gradients:
        return backward(block, dout, lse, delta, dq)


KERNEL: Final = TpuKernel()
