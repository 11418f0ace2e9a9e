# SPDX-License-Identifier: Apache-2.0
"""Launches a kernel from a JAX program: compiled on a GPU, interpreted on a CPU."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from ringattn_core.contract.launch import launch_primitive
from ringattn_core.contract.varying import align, axes_of

from .kernel_call import KernelCall
from .target import INTERPRETER, capability


def launch(
    kernel: Any,
    operands: Sequence[jax.Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    warps: int = 4,
    stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    registers: int | None = None,
    name: str = "",
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Launches the kernel and returns its outputs.

    The kernel's parameters are a pointer for each operand, a pointer for each output, then its `constants`. A pointer
    for which there is no operand or output may be named in `constants` as `None`. An operand that is `None` gets a
    pointer to one element that is never read. An entry `i: o` of `aliases` lets output `o` take the memory of operand
    `i`: each program may read its part of the operand and then write the same part of the output, and must not touch
    another program's part. The outputs vary over the mesh axes that the operands vary over.
    """
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
    return tuple(align(_launch.bind(*arrays, call=call), axes_of(operands)))


def _devices_together() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh.manual_axes)


def _interpreted(*arrays: jax.Array, call: KernelCall) -> list[jax.Array]:
    INTERPRETER.check(call.name)
    from . import interpreted

    return interpreted.launch(arrays, call)


def _compiled(*arrays: jax.Array, call: KernelCall, platform: str) -> list[jax.Array]:
    from . import compiled

    return compiled.launch(arrays, call, platform, capability())


_launch: Final = launch_primitive(
    "ringattn_triton_launch",
    lambda *_, call: call.outputs,
    {
        "cpu": _interpreted,
        "cuda": functools.partial(_compiled, platform="cuda"),
        "rocm": functools.partial(_compiled, platform="rocm"),
    },
)
