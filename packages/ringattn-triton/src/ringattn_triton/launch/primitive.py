# SPDX-License-Identifier: Apache-2.0
"""The JAX primitive that launches a kernel: compiled on a GPU, interpreted on a CPU.

The choice is made when a program is lowered, so one traced program serves both.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from ringattn_core.contract.varying import align, axes_of

from . import target
from .kernel_call import KernelCall


def launch(
    kernel: Any,
    operands: Sequence[jax.Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    aliases: Mapping[int, int] | None = None,
    registers: int | None = None,
    name: str = "",
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Launches the kernel and returns its outputs.

    The kernel's parameters are a pointer for each operand, one for each output, then its constants. An operand that is
    `None` gets a pointer to one element that is never read. An entry `i: o` of `aliases` lets output `o` take the
    memory of operand `i`: each program may read its part of the operand, then write that part of the output, and
    touches no other's. The outputs vary over the mesh axes that the operands vary over.
    """
    given = [operand for operand in operands if operand is not None]
    axes = axes_of(given)
    arrays = [jnp.zeros((1,), jnp.int32) if operand is None else operand for operand in operands]
    call = KernelCall(
        kernel=kernel,
        outputs=tuple(jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs),
        grid=tuple(grid),
        warps=warps,
        stages=stages,
        aliases=tuple(sorted((aliases or {}).items())),
        name=name or kernel.__name__,
        constants=tuple(sorted(constants.items())),
        registers=registers,
        among=_devices_together(),
    )
    return tuple(align(_launch.bind(*arrays, call=call), axes))


def _devices_together() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh.manual_axes)


def _abstract(*_: Any, call: KernelCall) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(output.shape, output.dtype) for output in call.outputs]


def _eager(*arrays: jax.Array, call: KernelCall) -> list[jax.Array]:
    return jax.jit(functools.partial(_launch.bind, call=call))(*arrays)


def _interpreted(*arrays: jax.Array, call: KernelCall) -> list[jax.Array]:
    if not target.interpretation_allowed():
        raise RuntimeError(
            f"kernel {call.name} was to be launched on a CPU, and Triton compiles for GPUs. Set "
            f"{target.INTERPRET_VARIABLE}=1 to interpret it, which is slow and meant for tests, or choose the backend "
            "'xla'."
        )
    from . import interpreted

    return interpreted.launch(arrays, call)


def _compiled(*arrays: jax.Array, call: KernelCall, platform: str) -> list[jax.Array]:
    from . import compiled

    return compiled.launch(arrays, call, platform, target.capability())


_launch: Final = Primitive("ringattn_triton_launch")
_launch.multiple_results = True
_launch.def_abstract_eval(_abstract)
_launch.def_impl(_eager)
mlir.register_lowering(_launch, mlir.lower_fun(_interpreted, multiple_results=True), platform="cpu")
for _platform in ("cuda", "rocm"):
    _lower = mlir.lower_fun(functools.partial(_compiled, platform=_platform), multiple_results=True)
    mlir.register_lowering(_launch, _lower, platform=_platform)
