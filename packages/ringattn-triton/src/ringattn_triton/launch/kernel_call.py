# SPDX-License-Identifier: Apache-2.0
"""What is known of one launch of a kernel when a program is traced."""

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
    """The registers with which each thread of a Gluon kernel begins; `None` leaves them to the compiler."""
    among: int
    """The number of devices that run the program together, and may wait for each other."""
