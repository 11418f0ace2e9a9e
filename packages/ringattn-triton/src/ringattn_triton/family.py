# SPDX-License-Identifier: Apache-2.0
"""What a family of kernels is: one object that says which blocks it takes, and computes them."""

from typing import Protocol

from jaxtyping import Array, Float, Float32
from ringattn_core.contract.protocol import Block, Gradients, Partial

from .launch.target import Target


class Family(Protocol):
    """Kernels for some GPUs. Another GPU's family is a folder with such an object, listed in `block_kernel.FAMILIES`.

    `why_not_forward` and `why_not_backward` give the reason why the family does not take a block on a device, or `None`
    where it takes it. `forward` and `backward` are those of `ringattn_core.contract.protocol.BlockKernel`.
    """

    def why_not_forward(self, block: Block, target: Target) -> str | None: ...

    def why_not_backward(self, block: Block, target: Target) -> str | None: ...

    def forward(self, block: Block, partial: Partial | None, target: Target) -> Partial: ...

    def backward(
        self,
        block: Block,
        dout: Float[Array, "B T N Hv"],
        lse: Float32[Array, "B N T"],
        delta: Float32[Array, "B N T"],
        dq: Float32[Array, "B T N H"] | None,
        target: Target,
    ) -> Gradients: ...
