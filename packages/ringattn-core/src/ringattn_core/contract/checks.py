# SPDX-License-Identifier: Apache-2.0
"""Calls a kernel, and checks, when the program is traced, that it returns what the block protocol asks for.

Inside `shard_map(check_vma=True)` a kernel gets arrays that all vary over the same mesh axes, and this module marks its
results as varying over these axes. A kernel need not do so itself, even for results that JAX does not track: those of
an FFI call, or constants.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import KernelError
from .protocol import Block, BlockKernel, Gradients, Partial
from .varying import align, axes_of


def forward(kernel: BlockKernel, block: Block, partial: Partial | None) -> Partial:
    """`kernel.forward(block, partial)`; raises unless the result is a `Partial` of the right shapes and dtypes."""
    result = kernel.forward(block, partial)
    batch, length, heads = block.q.shape[:3]
    wanted = {
        "out": jax.ShapeDtypeStruct((batch, length, heads, block.value_dim), block.q.dtype),
        "lse": jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
    }
    wanted |= {"max_logits": wanted["lse"]} if block.rule.return_max_logits else {}
    return align(_checked(kernel, "forward", result, Partial, wanted, block.final), axes_of(block, partial))


def backward(kernel: BlockKernel, block: Block, *arrays: Any) -> Gradients:
    """`kernel.backward(block, *arrays)`; raises if a gradient is missing or has a wrong shape or dtype.

    If `block.final`, the gradients get the dtypes of the inputs. Under `vmap`, the kernel may have run on a block that
    is not final (`batching`) and returned float32; `vmap` must not change a dtype.
    """
    result = kernel.backward(block, *arrays)
    inputs = {field.name: getattr(block, field.name[1:]) for field in dataclasses.fields(Gradients)}
    unasked = {"dbias"} if block.bias_fixed else set()
    wanted = {name: x for name, x in inputs.items() if x is not None and name not in unasked}
    checked = _checked(kernel, "backward", result, Gradients, wanted, block.final)
    return in_input_dtypes(block, align(checked, axes_of(block, arrays)))


def in_input_dtypes(block: Block, found: Gradients) -> Gradients:
    """The gradients `found`, in the dtypes of the inputs if `block` is final."""
    if not block.final:
        return found
    given = {name: x for name, x in vars(found).items() if x is not None}
    return dataclasses.replace(found, **{name: x.astype(getattr(block, name[1:]).dtype) for name, x in given.items()})


def _checked(kernel: BlockKernel, method: str, result: Any, kind: type, wanted: Mapping[str, Any], final: bool) -> Any:
    """Raises unless arrays of `result` have the shapes in `wanted`, and float32 or, if `final`, the dtypes in `wanted`.

    Returns `result` with `None` for all other arrays.
    """
    if not isinstance(result, kind):
        raise KernelError(kernel, method, f"returned {type(result).__name__}", f"Return a {kind.__name__}")
    for name, like in wanted.items():
        x = getattr(result, name)
        if getattr(x, "shape", None) != like.shape or not (x.dtype == jnp.float32 or (final and x.dtype == like.dtype)):
            got = f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x)
            raise KernelError(kernel, method, f"returned {name} = {got}", f"Return float32{list(like.shape)}")
    unasked = {field.name: None for field in dataclasses.fields(kind) if field.name not in wanted}
    return dataclasses.replace(result, **unasked)
