# SPDX-License-Identifier: Apache-2.0
"""Compiles Gluon kernels and launches them by jaxlib's own call: jax-triton compiles Triton kernels alone.

Nothing is written to disk, as with jax-triton: a program keeps its compiled kernels.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from .kernel_call import KernelCall
from .target import device_capability, ptx_version

_POINTERS: Final = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "uint32": "*u32"}
_ALIGNED: Final = 16
_WARP: Final = 32


class Compiled(NamedTuple):
    """PTX and what its launch needs; `scratch` are the bytes of global memory that each program works in."""

    name: str
    ptx: str
    warps: int
    shared: int
    scratch: int


def launch(arrays: Sequence[jax.Array], call: KernelCall, platform: str, capability: int | None) -> list[jax.Array]:
    """The outputs of the kernel, compiled for this compute capability, or for that of the device."""
    from jaxlib import gpu_triton

    kinds = tuple(_POINTERS[x.dtype.name] for x in (*arrays, *call.outputs))
    capability = capability or device_capability()
    made = _compiled(call.kernel, kinds, call.constants, call.warps, call.registers, capability)
    outputs = list(call.outputs)
    parameters = [gpu_triton.create_array_parameter(0, _ALIGNED) for _ in kinds]
    if made.scratch:
        # A compiled kernel takes a pointer to it after its own parameters. Not every jaxlib hands one over, and so it
        # is one output more; what a newer jaxlib hands over comes later, and is not looked at.
        outputs.append(jax.ShapeDtypeStruct((made.scratch * math.prod(call.grid),), jnp.uint8))
        parameters.append(gpu_triton.create_array_parameter(0, 128))
    kernel = gpu_triton.TritonKernel(made.name, made.warps, 1, made.shared, made.ptx, "", capability)
    grid = (*call.grid, 1, 1)[:3]
    message = gpu_triton.TritonKernelCall(kernel, *grid, parameters).to_proto(call.name, b"")
    results = jax.ffi.ffi_call(  # pyright: ignore[reportCallIssue]
        "triton_kernel_call",
        outputs,
        custom_call_api_version=2,
        legacy_backend_config=zlib.compress(message),  # pyright: ignore[reportArgumentType]
        input_output_aliases=dict(call.aliases),
    )(*arrays)
    return list(results)[: len(call.outputs)]


@functools.cache
def _compiled(
    kernel: Any,
    kinds: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    warps: int,
    registers: int | None,
    capability: int,
) -> Compiled:
    """The kernel through Triton's stages up to PTX, which XLA assembles for the driver that it finds."""
    names, fixed = kernel.arg_names, dict(constants)
    pointers = dict(zip((name for name in names if name not in fixed), kinds, strict=True))
    signature = {name: "constexpr" if name in fixed else pointers[name] for name in names}
    aligned = {(i,): [["tt.divisibility", _ALIGNED]] for i, name in enumerate(names) if name in pointers}
    source: Any = GluonASTSource(kernel, signature, {(names.index(n),): value for n, value in fixed.items()}, aligned)
    target = GPUTarget("cuda", capability, _WARP)
    backend: Any = make_backend(target)
    asked = {"num_warps": warps, "maxnreg": registers, "ptx_version": ptx_version(capability), "enable_fp_fusion": True}
    options = backend.parse_options(asked)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata: dict[str, Any] = {"target": target, **vars(options)}
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    order = list(stages)
    for stage in order[order.index(source.ext) : order.index("ptx") + 1]:
        module = stages[stage](module, metadata)
    return Compiled(
        metadata["name"], module, metadata["num_warps"], metadata["shared"], metadata.get("global_scratch_size") or 0
    )
