# SPDX-License-Identifier: Apache-2.0
"""Launches kernels for NVIDIA GPUs: Pallas lowers them to the Triton that is part of JAX."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from ringattn_core.contract.varying import align, axes_of

try:
    from jax.experimental.pallas import triton
except ImportError:  # JAX 0.11 and 0.12 deprecate the module
    triton: Any = None

from .scores import Activation, relu

BEFORE_AMPERE: Final = ("5.", "6.", "7.")
"""How the compute capabilities of the NVIDIA GPUs begin that have no kernels."""
WARPS: Final = 4
INTERPRET = False
"""Whether kernels are interpreted; set by tests on CPUs."""


def fits(activation: Activation, *heads: jax.Array) -> bool:
    """Whether there are kernels for this activation, for heads `[B, tokens, heads, size]` of these dtypes and sizes.

    A JAX without Pallas's Triton has none, nor have GPUs before Ampere.
    """
    has_kernels = triton is not None and not capability().startswith(BEFORE_AMPERE)
    heads_fit = all(x.dtype.itemsize == 2 and x.shape[3] in (16, 32, 64, 128) for x in heads)
    return has_kernels and heads_fit and activation in (relu, None)


def on_cuda(compute: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`compute()` in programs for NVIDIA GPUs, and where kernels are interpreted; else `otherwise()`."""
    return compute() if INTERPRET else jax.lax.platform_dependent(cuda=compute, default=otherwise)


def launch(
    kernel: "functools.partial[None]",
    grid: tuple[int, int, int, int],
    operands: Any,
    results: Any,
    stages: int = 2,
) -> Any:
    """Runs `kernel(part, *refs)` for each tile, part, group and batch row of the grid, with tiles fastest.

    Each operand is an array or `None`, the shape of its block, and a function of tile, part, group and row that gives
    the place of the block. Results have `(shape, dtype)` in place of the array.
    """
    tiles, parts, groups, rows = grid

    def spec(block: Any, index: Callable[..., Any]) -> pl.BlockSpec:
        def of_program(program: Any) -> Any:
            of_group = program // (tiles * parts)
            return index(program % tiles, program // tiles % parts, of_group % groups, of_group // groups)

        return pl.BlockSpec(block, of_program)

    arrays = [array for array, _, _ in operands]
    arrays = align(arrays, axes_of(arrays))
    varying = jax.typeof(arrays[0]).manual_axis_type

    def of_program(*refs: Any) -> None:
        kernel(pl.program_id(0) // tiles % parts, *refs)

    of_program.__name__ = kernel.func.__name__  # what profiles show
    return pl.pallas_call(
        of_program,
        grid=(tiles * parts * groups * rows,),  # one axis: each `jax.vmap` adds one, and Triton takes three
        in_specs=[None if x is None else spec(block, index) for x, block, index in operands],
        out_specs=[spec(block, index) for _, block, index in results],
        out_shape=[jax.ShapeDtypeStruct(*shaped, manual_axis_type=varying) for shaped, _, _ in results],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=stages),
        interpret=INTERPRET,
    )(*arrays)


def padded(x: Any, multiple: int, fill: int = 0, axis: int = 1) -> Any:
    """`x` with entries that hold `fill` at the end of an axis, so that `multiple` divides its length."""
    if x is None or x.shape[axis] % multiple == 0:
        return x
    padding = [(0, -x.shape[axis] % multiple if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, padding, constant_values=fill)


def capability() -> str:
    """The compute capability of the GPUs of this process, "gfx942" on an AMD GPU; "" if it has no GPU."""
    return str(getattr(jax.local_devices()[0], "compute_capability", ""))
