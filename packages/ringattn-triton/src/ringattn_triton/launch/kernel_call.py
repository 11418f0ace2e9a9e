# SPDX-License-Identifier: Apache-2.0
"""One launch of a kernel, as far as it is known when a program is traced."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The static parameters of the launch primitive."""

    kernel: Any
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    warps: int
    stages: int
    aliases: tuple[tuple[int, int], ...]
    name: str
    constants: tuple[tuple[str, Any], ...]
    registers: int | None
    """How many registers a thread of a Gluon kernel begins with; of other kernels the compiler decides."""
    among: int
    """How many devices run the program together, and may wait for each other."""
