# SPDX-License-Identifier: Apache-2.0
"""Launches Triton kernels on GPUs through jax-triton, of any version; no other module knows jax-triton."""

import functools
import linecache
import os
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import triton
import triton.language as tl

from .kernel_call import KernelCall
from .target import device_capability, ptx_version


@functools.cache
def jax_triton() -> ModuleType:
    """jax-triton; importing it changes an environment variable of Triton's, which is put back."""
    variable = "TRITON_CACHE_DIR"
    before = os.environ.get(variable)
    try:
        import jax_triton
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
    return jax_triton


def launch(arrays: Sequence[jax.Array], call: KernelCall, platform: str, capability: int | None) -> list[jax.Array]:
    """The outputs of the kernel, compiled for this compute capability, or for that of the device."""
    module = jax_triton()
    kernel: Any = call.kernel
    options: dict[str, Any] = {}
    if version(module) >= (0, 4):
        options["out_type"] = list(call.outputs)
        if platform == "cuda":
            capability = capability or device_capability()
            options["backend_options"] = {"ptx_version": ptx_version(capability), "enable_fp_fusion": True}
        if call.aliases:
            kernel = sharing(kernel, len(arrays), len(call.outputs), call.aliases, tuple(n for n, _ in call.constants))
    else:
        options["out_shape"] = list(call.outputs)
    if call.aliases:
        options["input_output_aliases"] = dict(call.aliases)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return module.triton_call(
            *arrays,
            kernel=kernel,
            grid=call.grid,
            name=call.name,
            num_warps=call.warps,
            num_stages=call.stages,
            compute_capability=capability,
            **options,
            **dict(call.constants),
        )


def version(module: ModuleType) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])


@functools.cache
def sharing(
    kernel: Any, operands: int, outputs: int, aliases: tuple[tuple[int, int], ...], constants: tuple[str, ...]
) -> Any:
    """The kernel as jax-triton 0.4 wants it: without parameters for the outputs that share an operand's memory."""
    pointers = kernel.arg_names[: operands + outputs]
    shared = {operands + output: operand for operand, output in aliases}
    parameters = [name for i, name in enumerate(pointers) if i not in shared]
    arguments = [pointers[shared.get(i, i)] for i in range(len(pointers))]
    header = ", ".join([*parameters, *(f"{name}: tl.constexpr" for name in constants)])
    call = ", ".join([*arguments, *(f"{name}={name}" for name in constants)])
    lines = [f"def {kernel.__name__}({header}):\n", f"    kernel({call})\n"]
    file = f"<{kernel.__module__}.{kernel.__name__} sharing {aliases}>"
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    names: dict[str, Any] = {"tl": tl, "kernel": kernel, "__name__": kernel.__module__}
    exec(compile("".join(lines), file, "exec"), names)
    return triton.jit(names[kernel.__name__])
