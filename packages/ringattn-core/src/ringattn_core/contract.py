# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel returned what the block protocol asks for, told when the program is traced."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from .errors import KernelError
from .protocol import Block, BlockKernel, Gradients, Partial


def forward(kernel: BlockKernel, block: Block, partial: Partial) -> Partial:
    """`kernel.forward`, refused where its result is no `Partial` of the same shapes."""
    result = kernel.forward(block, partial)
    _check(kernel, "forward", result, Partial, {"out": partial.out.shape, "lse": partial.lse.shape})
    return dataclasses.replace(result, empty=False)


def backward(kernel: BlockKernel, block: Block, *arrays: Any) -> Gradients:
    """`kernel.backward`, refused where a gradient is missing or of another shape or dtype."""
    result = kernel.backward(block, *arrays)
    wanted = {"dq": block.q.shape, "dk": block.k.shape, "dv": block.v.shape}
    wanted |= {} if block.bias is None else {"dbias": block.bias.shape}
    wanted |= {} if block.slopes is None else {"dslopes": block.slopes.shape}
    _check(kernel, "backward", result, Gradients, wanted)
    unasked = {field.name: None for field in dataclasses.fields(Gradients) if field.name not in wanted}
    return dataclasses.replace(result, **unasked)


def _check(kernel: BlockKernel, method: str, result: Any, kind: type, wanted: dict[str, tuple[int, ...]]) -> None:
    if not isinstance(result, kind):
        raise KernelError(kernel, method, f"returned {type(result).__name__}", f"Return a {kind.__name__}")
    for name, shape in wanted.items():
        x = getattr(result, name)
        if x is None or x.shape != shape or x.dtype != jnp.float32:
            got = "None" if x is None else f"{x.dtype}{list(x.shape)}"
            raise KernelError(kernel, method, f"returned {name} = {got}", f"Return float32{list(shape)}")
