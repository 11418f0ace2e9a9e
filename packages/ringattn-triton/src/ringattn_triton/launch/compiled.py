# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton and Gluon kernels, and launches them by jaxlib's `triton_kernel_call_ffi`."""

import dataclasses
import functools
import math
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from ..kernels.parameters import by_parameter, paths
from .disk_cache import Compiled, kept
from .kernel_call import KernelCall
from .target import Target

_KIND: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "int32": "i32", "uint32": "u32"}
_ALIGNED: Final = 16


def launch(arrays: Sequence[jax.Array], call: KernelCall, platform: str, capability: int | None) -> list[jax.Array]:
    """Launches a compiled kernel and returns its outputs; `capability` `None` stands for that of the local device."""
    from jaxlib import gpu_triton

    if platform == "cuda":
        capability = capability or int(jax.local_devices()[0].compute_capability.replace(".", ""))
        target = GPUTarget("cuda", capability, 32)
    else:
        capability = gpu_triton.get_compute_capability(0)
        target = GPUTarget("hip", jax.local_devices()[0].compute_capability.split(":")[0], 64)
    made = compile_kernel(call, tuple(x.dtype.name for x in (*arrays, *call.outputs)), target)
    code = made.code
    if platform == "rocm":
        # On AMD GPUs jaxlib takes the path of a file, and reads the file when the program runs.
        with tempfile.NamedTemporaryFile(suffix=".hsaco", delete=False) as file:
            file.write(made.code)
        code = file.name
    outputs = list(call.outputs)
    parameters = [gpu_triton.create_array_parameter(0, _ALIGNED) for _ in (*arrays, *outputs)]
    if made.scratch:
        # A compiled kernel takes a pointer to its scratch memory after its own parameters. Not every jaxlib passes this
        # pointer, so the memory is an additional output here. The pointer that a newer jaxlib passes comes later, and
        # is not read.
        outputs.append(jax.ShapeDtypeStruct((made.scratch * math.prod(call.grid),), jnp.uint8))
        parameters.append(gpu_triton.create_array_parameter(0, 128))
    kernel = gpu_triton.TritonKernel(made.name, made.warps, 1, made.shared, code, "", capability)
    grid = (*call.grid, 1, 1)[:3]
    message = gpu_triton.TritonKernelCall(kernel, *grid, parameters).to_proto(call.name, b"")
    call_kernel = jax.ffi.ffi_call("triton_kernel_call_ffi", outputs, input_output_aliases=dict(call.aliases))
    results = list(call_kernel(*arrays, opaque=zlib.compress(message)))[: len(call.outputs)]
    # In a loop, XLA may write an output straight into the stack of results. It then no longer shares memory with its
    # operand, and what the kernel did not write is undefined: see benchmarks/upstream/alias_in_loop.py.
    return jax.lax.optimization_barrier(results) if call.aliases else results


@functools.cache
def compile_kernel(call: KernelCall, dtypes: tuple[str, ...], target: GPUTarget) -> Compiled:
    """Compiles the kernel of a launch, or loads it from disk; `dtypes` are those of operands, then of outputs.

    A kernel that needs more shared memory than an NVIDIA GPU has is compiled with fewer stages; tiles and the order of
    sums stay. Only the compiler knows the need: it depends on the GPU, and options of a call add tiles of scores. If it
    does not fit with one stage either, the launch fails.
    """
    names, fixed = call.kernel.arg_names, dict(call.constants)
    pointers = by_parameter([name for name in names if name not in fixed], (f"*{_KIND[x]}" for x in dtypes))
    signature = {name: "constexpr" if name in fixed else pointers[name] for name in names}
    aligned = {path: [["tt.divisibility", _ALIGNED]] for path in paths(names, pointers)}
    kind: Any = GluonASTSource if getattr(call.kernel, "is_gluon", bool)() else ASTSource
    source = kind(call.kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, aligned)
    backend: Any = make_backend(target)
    asked: dict[str, Any] = {"num_warps": call.warps, "num_stages": call.stages, "enable_fp_fusion": True}
    if target.backend == "cuda":
        # CUDA 12.8 and 12.9 assemble these versions of PTX. Triton's default may be too new for the assembler of XLA.
        asked |= {"maxnreg": call.registers, "ptx_version": 87 if int(target.arch) < 100 else 88}
    options = backend.parse_options(asked)
    made = kept(source, backend, options, lambda: _by_stages(source, backend, options, target))
    limit = Target("cuda", int(target.arch)).shared_memory if target.backend == "cuda" else None
    if limit is not None and made.shared > limit and call.stages > 1:
        return compile_kernel(dataclasses.replace(call, stages=call.stages - 1), dtypes, target)
    return made


def _by_stages(source: Any, backend: Any, options: Any, target: GPUTarget) -> Compiled:
    """Runs Triton's compiler stages. On NVIDIA GPUs the last one gives PTX, which XLA assembles for its driver."""
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
    last = "ptx" if target.backend == "cuda" else "hsaco"
    for stage in order[order.index(source.ext) : order.index(last) + 1]:
        module = stages[stage](module, metadata)
    return Compiled(
        metadata["name"], module, metadata["num_warps"], metadata["shared"], metadata.get("global_scratch_size") or 0
    )
