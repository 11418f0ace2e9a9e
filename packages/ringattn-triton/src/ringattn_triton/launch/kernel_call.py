# SPDX-License-Identifier: Apache-2.0
"""Describes one launch of a kernel by what is known when the JAX program is traced: all but the arrays themselves."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The static parameters of the launch primitive.

    `aliases` are pairs `(operand, output)` of numbers of arrays that share memory. `constants` are the names and values
    of the kernel's compile-time constants.
    """

    kernel: Any
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    warps: int
    stages: int
    aliases: tuple[tuple[int, int], ...]
    name: str
    constants: tuple[tuple[str, Any], ...]
    registers: int | None
    """How many registers each thread of a Gluon kernel has at its start; `None`: the compiler decides."""
    among: int
    """The number of devices that run the program together, and may wait for each other in collectives."""
