# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel returned what the block protocol asks for, told when the program is traced."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..errors import KernelError
from .protocol import Block, BlockKernel, Gradients, Partial


def forward(kernel: BlockKernel, block: Block, partial: Partial) -> Partial:
    """`kernel.forward`, refused where its result is no `Partial` of the same shapes and dtypes."""
    result = kernel.forward(block, partial)
    asked = {name: x for name in ("out", "lse", "rest") if (x := getattr(partial, name)) is not None}
    asked |= {} if block.own is None else {"found": block.own.found}
    _check(kernel, "forward", result, Partial, {name: _like(x) for name, x in asked.items()})
    unasked = {name: None for name in ("rest", "found") if name not in asked}
    return dataclasses.replace(result, empty=False, **unasked)


def backward(kernel: BlockKernel, block: Block, *arrays: Any) -> Gradients:
    """`kernel.backward`, refused where a gradient is missing or of another shape or dtype."""
    result = kernel.backward(block, *arrays)
    wanted = {"dq": _like(block.q), "dk": _like(block.k), "dv": _like(block.v)}
    wanted |= {} if block.bias is None or block.bias_fixed else {"dbias": _like(block.bias)}
    wanted |= {} if block.slopes is None else {"dslopes": _like(block.slopes)}
    if arrays[-1] is not None:
        wanted = {name: (shape, jnp.dtype(jnp.float32)) for name, (shape, _) in wanted.items()}
    _check(kernel, "backward", result, Gradients, wanted)
    unasked = {field.name: None for field in dataclasses.fields(Gradients) if field.name not in wanted}
    return dataclasses.replace(result, **unasked)


def _like(x: Any) -> tuple[tuple[int, ...], Any]:
    return x.shape, jnp.dtype(x.dtype)


def _check(
    kernel: BlockKernel, method: str, result: Any, kind: type, wanted: dict[str, tuple[tuple[int, ...], Any]]
) -> None:
    if not isinstance(result, kind):
        raise KernelError(kernel, method, f"returned {type(result).__name__}", f"Return a {kind.__name__}")
    for name, (shape, dtype) in wanted.items():
        x = getattr(result, name)
        if x is None or x.shape != shape or x.dtype != dtype:
            got = "None" if x is None else f"{x.dtype}{list(x.shape)}"
            raise KernelError(kernel, method, f"returned {name} = {got}", f"Return {dtype}{list(shape)}")
