# SPDX-License-Identifier: Apache-2.0
"""The block kernel that core calls: it gives each block to the first family of kernels that takes the block."""

import dataclasses
import functools
from typing import Final, Protocol

import jax
from jaxtyping import Array, Float, Float32
from ringattn_core.contract import heads_as_rows
from ringattn_core.contract.protocol import Block, Gradients, Partial

from . import grouped_rows
from .few_queries import family as few_queries
from .hopper import family as hopper
from .launch.target import Target, target
from .portable import family as portable
from .tuning_candidates import candidate_configs


class Family(Protocol):
    """A set of kernels for some GPUs: a folder whose module `family` has these functions, and which `FAMILIES` lists.

    `why_not_forward` and `why_not_backward` say why the family cannot compute a block on a device, or return `None` if
    it can. `forward` and `backward` are those of `ringattn_core.contract.protocol.BlockKernel`.
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


FAMILIES: Final[tuple[Family, ...]] = (hopper, few_queries, portable)
"""In order of preference: the first family that takes a block computes it. The last family takes every block."""


class TritonKernel:
    """Attention of one block on GPUs: every feature, heads of up to 256, and by default the same bits at every run."""

    candidate_configs = staticmethod(candidate_configs)
    few_queries = few_queries.MOST_ROWS

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
    """Computes a block by the first family that takes it; jitted, so that equal blocks of all hops are traced once."""
    if grouped_rows.grouped(block):
        partial = None if partial is None else heads_as_rows.partial_of_rows(partial, block.group)
        found = _forward(grouped_rows.as_rows(block), partial, target)
        return heads_as_rows.partial_of_heads(found, block.group)
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
    if grouped_rows.grouped(block):
        of_rows = [x if x is None else heads_as_rows.rows(x, block.group) for x in (dout, dq)]
        numbers = [heads_as_rows.numbers_of_rows(x, block.group) for x in (lse, delta)]
        found = _backward(grouped_rows.as_rows(block), of_rows[0], *numbers, of_rows[1], target)
        return dataclasses.replace(found, dq=heads_as_rows.heads(found.dq, block.group))
    family = next(family for family in FAMILIES if family.why_not_backward(block, target) is None)
    return family.backward(block, dout, lse, delta, dq, target)


KERNEL: Final = TritonKernel()
