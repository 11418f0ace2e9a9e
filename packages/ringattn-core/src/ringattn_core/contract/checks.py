# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel returned what the block protocol asks for, told when the program is traced."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..errors import KernelError
from .protocol import Block, BlockKernel, Gradients, Partial

Expected = tuple[tuple[int, ...], Any]
"""A shape, and the dtype that may stand for float32 where the block is final."""


def forward(kernel: BlockKernel, block: Block, partial: Partial | None) -> Partial:
    """`kernel.forward`, refused where its result is no `Partial` of the right shapes and dtypes."""
    result = kernel.forward(block, partial)
    batch, length, heads = block.q.shape[:3]
    rows = ((batch, heads, length), jnp.dtype(jnp.float32))
    wanted: dict[str, Expected] = {"out": ((batch, length, heads, block.value_dim), block.q.dtype), "lse": rows}
    if block.bias is not None and isinstance(result, Partial) and result.shift is not None:
        wanted["shift"] = rows
    return _checked(kernel, "forward", result, Partial, wanted, block.final)


def backward(kernel: BlockKernel, block: Block, *arrays: Any) -> Gradients:
    """`kernel.backward`, refused where a gradient is missing or of another shape or dtype."""
    result = kernel.backward(block, *arrays)
    wanted = {"dq": _like(block.q), "dk": _like(block.k), "dv": _like(block.v)}
    wanted |= {} if block.bias is None or block.bias_fixed else {"dbias": _like(block.bias)}
    wanted |= {} if block.slopes is None else {"dslopes": _like(block.slopes)}
    return _checked(kernel, "backward", result, Gradients, wanted, block.final)


def _like(x: Any) -> Expected:
    return x.shape, jnp.dtype(x.dtype)


def _checked(
    kernel: BlockKernel, method: str, result: Any, kind: type, wanted: dict[str, Expected], final: bool
) -> Any:
    """The result without what was not asked for."""
    if not isinstance(result, kind):
        raise KernelError(kernel, method, f"returned {type(result).__name__}", f"Return a {kind.__name__}")
    for name, (shape, narrow) in wanted.items():
        dtypes = {jnp.dtype(jnp.float32), *([narrow] if final else [])}
        x = getattr(result, name)
        if x is None or x.shape != shape or x.dtype not in dtypes:
            got = "None" if x is None else f"{x.dtype}{list(x.shape)}"
            raise KernelError(kernel, method, f"returned {name} = {got}", f"Return float32{list(shape)}")
    unasked = {field.name: None for field in dataclasses.fields(kind) if field.name not in wanted}
    return dataclasses.replace(result, **unasked)
