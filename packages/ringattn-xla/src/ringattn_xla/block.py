# SPDX-License-Identifier: Apache-2.0
"""The block kernel that core drives: forward and backward, each traced once for all hops of a ring."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32
from ringattn_core.contract.merge import empty
from ringattn_core.contract.protocol import Block, Gradients, Partial

from . import backward, candidates, forward

_forward = jax.jit(forward.forward)
_backward = jax.jit(backward.backward)


class XlaKernel:
    """Blockwise attention in `jax.lax`: any shape, every feature, memory linear in the lengths."""

    candidate_configs = staticmethod(candidates.candidate_configs)

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        return _forward(block, empty(block) if partial is None else partial)

    def backward(
        self,
        block: Block,
        dout: Float[Array, "B T N Hv"],
        lse: Float32[Array, "B N T"],
        delta: Float32[Array, "B N T"],
        dq: Float32[Array, "B T N H"] | None,
    ) -> Gradients:
        if dq is None:
            dq = jnp.zeros(block.q.shape, jnp.float32)
        return _backward(block, dout, lse, delta, dq)


KERNEL: Final = XlaKernel()
