# SPDX-License-Identifier: Apache-2.0
"""For which device kernels are compiled: the GPU of this machine, a GPU that the caller names, or the interpreter."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Final, Literal

import jax
from ringattn_core.contract.launch import Interpreter

from ..plugin import INTERPRET_VARIABLE

INTERPRETER: Final = Interpreter(INTERPRET_VARIABLE, "Triton", "GPU", "jax[cuda13]")
_SHARED_MEMORY: Final = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB of shared memory that one program can have, by compute capability."""

_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar("ringattn_triton_capability", default=None)


@dataclasses.dataclass(frozen=True)
class Target:
    """The device for which kernels are compiled; `capability` is 90 for Hopper, 0 for AMD GPUs and the interpreter."""

    kind: Literal["cuda", "rocm", "interpreter"]
    capability: int = 0

    @property
    def shared_memory(self) -> int | None:
        """The bytes of shared memory that one program can have; `None` in the interpreter, which has no limit."""
        if self.kind == "interpreter":
            return None
        return _SHARED_MEMORY.get(self.capability, 99 if self.kind == "cuda" else 64) * 1024


def target() -> Target:
    """The `Target` of the JAX program that is being traced."""
    if interpreting():
        return Target("interpreter")
    asked = capability()
    if asked is not None:
        return Target("cuda", asked)
    found = str(getattr(jax.devices()[0], "compute_capability", "8.0"))
    if found.startswith("gfx"):
        return Target("rocm")
    return Target("cuda", round(10 * float(found)))


def interpreting() -> bool:
    """Whether kernels of the JAX program that is being traced will run in the interpreter, on a CPU."""
    return INTERPRETER.allowed and capability() is None and jax.default_backend() == "cpu"


def capability() -> int | None:
    """The compute capability that an enclosing `compiling_for` names, or `None` outside of it."""
    return _capability.get()


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """A context in which programs that are lowered for `"cuda"` are compiled for this compute capability (90: Hopper).

    The machine needs no GPU.
    """
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)
