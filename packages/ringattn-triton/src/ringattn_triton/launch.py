# SPDX-License-Identifier: Apache-2.0
"""How a kernel is launched from a JAX program: compiled on a GPU, interpreted on a CPU.

Which of the two is decided when the program is lowered, so that one traced program serves both.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from ringattn_core.contract.varying import align, axes_of

INTERPRET_VARIABLE: Final = "RINGATTN_TRITON_INTERPRET"

_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar("ringattn_triton_capability", default=None)


@dataclasses.dataclass(frozen=True)
class Call:
    """All of a launch that is known when the program is traced."""

    kernel: Any
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    warps: int
    stages: int
    aliases: tuple[tuple[int, int], ...]
    name: str
    constants: tuple[tuple[str, Any], ...]
    registers: int | None
    """How many a thread of a kernel in Gluon may have when it begins; of others the compiler decides."""
    among: int
    """How many devices run the program together, and may wait for each other."""


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
    """What the kernel writes to its outputs.

    The kernel's parameters are a pointer for each operand, one for each output, then its constants. An operand that is
    `None` gets a pointer to one element that means nothing. An entry `i: o` of `aliases` lets output `o` take the
    memory of operand `i`: each program may read its part of the operand, then write that part of the output, and
    touches no other's. The outputs vary over the mesh axes that the operands vary over.
    """
    given = [operand for operand in operands if operand is not None]
    axes = axes_of(given)
    arrays = [jnp.zeros((1,), jnp.int32) if operand is None else operand for operand in operands]
    call = Call(
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


def interpreting() -> bool:
    """Whether the kernels of a program that is traced now will be interpreted: on a CPU, where the user says so."""
    return interpretation_allowed() and capability() is None and jax.default_backend() == "cpu"


def interpretation_allowed() -> bool:
    """Whether the environment asks for it; programs that are lowered for GPUs are compiled all the same."""
    return os.environ.get(INTERPRET_VARIABLE, "") == "1"


def capability() -> int | None:
    """The compute capability that `compiling_for` names, or `None` where the device decides."""
    return _capability.get()


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Programs that are lowered for `"cuda"` in this context are for GPUs of this compute capability (90: Hopper).

    That is how a machine without a GPU compiles what one with a GPU would launch.
    """
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def _abstract(*_: Any, call: Call) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(output.shape, output.dtype) for output in call.outputs]


def _eager(*arrays: jax.Array, call: Call) -> list[jax.Array]:
    return jax.jit(functools.partial(_launch.bind, call=call))(*arrays)


def _interpreted(*arrays: jax.Array, call: Call) -> list[jax.Array]:
    if not interpretation_allowed():
        raise RuntimeError(
            f"kernel {call.name} was to be launched on a CPU, and Triton compiles for GPUs. Set {INTERPRET_VARIABLE}=1 "
            "to interpret it, which is slow and meant for tests, or choose the backend 'xla'."
        )
    from . import interpret

    return interpret.launch(arrays, call)


def _compiled(*arrays: jax.Array, call: Call, platform: str) -> list[jax.Array]:
    from . import compiled

    return compiled.launch(arrays, call, platform, capability())


_launch: Final = Primitive("ringattn_triton_launch")
_launch.multiple_results = True
_launch.def_abstract_eval(_abstract)
_launch.def_impl(_eager)
mlir.register_lowering(_launch, mlir.lower_fun(_interpreted, multiple_results=True), platform="cpu")
for _platform in ("cuda", "rocm"):
    _lower = mlir.lower_fun(functools.partial(_compiled, platform=_platform), multiple_results=True)
    mlir.register_lowering(_launch, _lower, platform=_platform)
