# SPDX-License-Identifier: Apache-2.0
"""The block kernel that core drives: it gives each block to the first family of kernels that takes it."""

import functools
from typing import Final, Protocol

import jax
from jaxtyping import Array, Float, Float32
from ringattn_core.contract.protocol import Block, Gradients, Partial

from .hopper import family as hopper
from .launch.target import Target, target
from .portable import family as portable
from .tuning_candidates import candidate_configs


class Family(Protocol):
    """Kernels for some GPUs: a folder whose module `family` has these functions, listed in `FAMILIES`.

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


FAMILIES: Final[tuple[Family, ...]] = (hopper, portable)
"""The first family that takes a block computes it. The last one takes every block."""


class TritonKernel:
    """Blockwise attention on GPUs: every feature, heads of up to 256, the same bits at every run."""

    candidate_configs = staticmethod(candidate_configs)

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        return _forward(block, partial, target())

    def backward(
        self,
        block: Block,
        dout: Float[Array, "B T N Hv"],
        lse: Float32[Array, "B N T"],
        delta: Float32[Array, "B N T"],
        dq: Float32[Array, "B T N H"] | None,
    ) -> Gradients:
        return _backward(block, dout, lse, delta, dq, target())


@functools.partial(jax.jit, static_argnums=2)
def _forward(block: Block, partial: Partial | None, target: Target) -> Partial:
    """Runs under `jax.jit`, like `_backward`, so that equal blocks of all hops are traced once."""
    family = next(family for family in FAMILIES if family.why_not_forward(block, target) is None)
    return family.forward(block, partial, target)


@functools.partial(jax.jit, static_argnums=5)
def _backward(
    block: Block,
    dout: Float[Array, "B T N Hv"],
    lse: Float32[Array, "B N T"],
    delta: Float32[Array, "B N T"],
    dq: Float32[Array, "B T N H"] | None,
    target: Target,
) -> Gradients:
    family = next(family for family in FAMILIES if family.why_not_backward(block, target) is None)
    return family.backward(block, dout, lse, delta, dq, target)


KERNEL: Final = TritonKernel()
