# SPDX-License-Identifier: Apache-2.0
"""How much each kernel may spill on each target: nothing, but for what is listed here with its reason."""

from typing import Final

CUDA: Final = (80, 86, 89, 90, 100, 120)
ROCM: Final = ("gfx942",)
SHARED: Final = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, "gfx942": 64}
"""KiB that one program can have."""

SPILLS: Final[dict[tuple[str, int, str], tuple[dict[int | str, int], str]]] = {
    ("bfloat16", 128, "ringattn_backward_keys"): (
        {90: 96, 100: 384, 120: 16},
        "two float32 sums of 128 dims for each key take half of the registers; tiles that spill nothing are slower",
    ),
    ("float32", 64, "ringattn_forward"): (
        {86: 8, 89: 8},
        "the assembler's own choice, at 80 registers of 255: no value is kept there for want of registers",
    ),
}
"""Bytes of stack a thread by (dtype, head size, kernel), then by target, over Triton 3.6 to 3.9; the reason."""


def allowed(dtype: str, head_dim: int, kernel: str, target: int | str) -> tuple[int, str]:
    """The bound and its reason."""
    bounds, reason = SPILLS.get((dtype, head_dim, kernel), ({}, "nothing may spill"))
    return bounds.get(target, 0), reason
