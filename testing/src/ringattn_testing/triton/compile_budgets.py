# SPDX-License-Identifier: Apache-2.0
"""How much each kernel may spill on each target: nothing, but for what is listed here with its reason."""

from typing import Final

from ringattn_triton.availability import triton_version

CUDA: Final = (80, 86, 89, 90, 100, 120)
ROCM: Final = ("gfx942",)
SHARED: Final = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, "gfx942": 64}
"""KiB that one program can have."""

_FEW_A_STEP: Final = "steps with masks, and ends of turns, spill; the other steps read back a few words at most"
_ON_HOPPER: Final = "the fastest tiles of those timed on Hopper; the smaller ones that spill nothing are slower"
_LIKE_HOPPER: Final = "the tiles of Hopper, which are not timed here"
_THREE_PRODUCTS: Final = "float32 is split in three for the tensor cores, and the parts are held in registers"

_AT_THE_END: Final = "registers are given out by eights, and what a turn begins and ends with needs a few more"
_CONTINUED: Final = "where it continues what other keys have left, a turn begins with more"
_TWO_POINTERS: Final = "keys and values have a pointer each, outside the loops"

_WHILE_MASKING: Final = "steps that mask hold positions and ids beside the accumulators; the others spill nothing"

_FETCHING: Final = "the warp that fetches has 24 registers, and holds what it needs once a turn elsewhere"

_DRAWS: Final = "draws are held beside sums of 128 queries; with it the kernel takes 0.8 of the time of two passes"

_LOOPS_OF_BOTH_WAYS: Final = "one loop for either way of drawing; a kernel that spilled 64 bytes took 1.04 of the time"

SPILLS: Final[dict[tuple[str, int, str], dict[int | str, tuple[int, str]]]] = {
    ("bfloat16", 64, "ringattn_forward"): dict.fromkeys((80, 86, 89, 120), (8, _TWO_POINTERS)),
    ("bfloat16", 64, "ringattn_backward_keys"): {100: (48, _LIKE_HOPPER)},
    ("bfloat16", 64, "ringattn_backward_queries"): {90: (48, _ON_HOPPER)},
    ("bfloat16", 64, "ringattn_hopper_forward"): {90: (296, _AT_THE_END)},
    ("bfloat16", 64, "ringattn_hopper_backward"): {90: (32, _AT_THE_END)},
    ("bfloat16", 64, "ringattn_hopper_backward with masks"): {90: (296, _WHILE_MASKING)},
    ("bfloat16", 64, "ringattn_hopper_backward with dropout"): {90: (304, _DRAWS)},
    ("bfloat16", 128, "ringattn_hopper_backward"): {90: (8, _AT_THE_END)},
    ("bfloat16", 128, "ringattn_hopper_backward with masks"): {90: (96, _WHILE_MASKING)},
    ("bfloat16", 128, "ringattn_hopper_backward with a bias"): {90: (32, _AT_THE_END)},
    ("bfloat16", 128, "ringattn_hopper_backward with a bias and masks"): {90: (128, _WHILE_MASKING)},
    ("bfloat16", 96, "ringattn_hopper_backward with a bias and masks"): {90: (152, _WHILE_MASKING)},
    ("bfloat16", 72, "ringattn_hopper_backward with a bias"): {90: (32, _AT_THE_END)},
    ("bfloat16", 72, "ringattn_hopper_backward with a bias and masks"): {90: (152, _WHILE_MASKING)},
    ("float16", 128, "ringattn_hopper_backward with a bias and masks"): {90: (112, _WHILE_MASKING)},
    ("bfloat16", 96, "ringattn_hopper_backward"): {90: (8, _AT_THE_END)},
    ("bfloat16", 96, "ringattn_hopper_backward with masks"): {90: (88, _WHILE_MASKING)},
    ("bfloat16", 96, "ringattn_hopper_backward with dropout"): {90: (144, _WHILE_MASKING)},
    ("bfloat16", 128, "ringattn_hopper_backward with dropout"): {90: (144, _WHILE_MASKING)},
    ("bfloat16", 256, "ringattn_hopper_backward"): {90: (24, _FETCHING)},
    ("bfloat16", 256, "ringattn_hopper_backward with masks"): {90: (32, _FETCHING)},
    ("bfloat16", 128, "ringattn_hopper_forward"): {90: (16, _CONTINUED)},
    ("bfloat16", 192, "ringattn_hopper_forward"): {90: (168, _WHILE_MASKING)},
    ("bfloat16", 192, "ringattn_hopper_forward with dropout"): {90: (16, _LOOPS_OF_BOTH_WAYS)},
    ("bfloat16", 192, "ringattn_hopper_backward"): {90: (8, _FETCHING)},
    ("bfloat16", 192, "ringattn_hopper_backward with masks"): {90: (8, _FETCHING)},
    ("bfloat16", 256, "ringattn_hopper_forward"): {90: (16, _AT_THE_END)},
    ("bfloat16", 128, "ringattn_hopper_forward with a soft cap"): {90: (96, _AT_THE_END)},
    ("bfloat16", 128, "ringattn_hopper_forward with a bias"): {90: (72, _CONTINUED)},
    ("bfloat16", 128, "ringattn_hopper_forward with dropout"): {90: (200, _LOOPS_OF_BOTH_WAYS)},
    ("bfloat16", 256, "ringattn_hopper_forward with dropout"): {90: (144, _LOOPS_OF_BOTH_WAYS)},
    ("bfloat16", 64, "ringattn_hopper_forward with slopes"): {90: (304, _FEW_A_STEP)},
    ("bfloat16", 128, "ringattn_hopper_forward with slopes"): {90: (32, _FEW_A_STEP)},
    ("bfloat16", 128, "ringattn_hopper_forward with slopes and a soft cap"): {90: (32, _FEW_A_STEP)},
    ("bfloat16", 256, "ringattn_hopper_forward with slopes"): {90: (32, _FEW_A_STEP)},
    ("bfloat16", 128, "ringattn_backward_keys"): {
        90: (80, _ON_HOPPER),
        100: (352, _LIKE_HOPPER),
        120: (32, "two float32 sums of 128 dims for each key take half of the registers"),
    },
    ("float32", 64, "ringattn_forward"): {
        80: (88, _THREE_PRODUCTS),
        86: (64, _THREE_PRODUCTS),
        89: (64, _THREE_PRODUCTS),
    },
    ("float32", 64, "ringattn_backward_keys"): {
        80: (40, _THREE_PRODUCTS),
        86: (24, _THREE_PRODUCTS),
        89: (24, _THREE_PRODUCTS),
        90: (112, _THREE_PRODUCTS),
        100: (104, _THREE_PRODUCTS),
        120: (48, _THREE_PRODUCTS),
    },
    ("float32", 64, "ringattn_backward_queries"): {
        90: (48, _THREE_PRODUCTS),
        100: (56, _THREE_PRODUCTS),
        120: (8, _THREE_PRODUCTS),
    },
}
"""Bytes of stack a thread by (dtype, head size, kernel), then by target, and why.

Triton 3.6 and 3.9 both keep to it, except for what `SPILLS_AFTER_3_6` lists. `python tests/test_compile.py` prints
what there is now.
"""

_DRAWS_AFTER_3_6: Final = "Triton 3.9 spills more beside the draws than 3.6, for an unknown reason; not timed"
SPILLS_AFTER_3_6: Final[dict[tuple[str, int, str], dict[int | str, tuple[int, str]]]] = {
    ("bfloat16", 64, "ringattn_hopper_backward with dropout"): {90: (592, _DRAWS_AFTER_3_6)},
    ("bfloat16", 96, "ringattn_hopper_backward with dropout"): {90: (232, _DRAWS_AFTER_3_6)},
    ("bfloat16", 128, "ringattn_hopper_backward with dropout"): {90: (232, _DRAWS_AFTER_3_6)},
    ("bfloat16", 128, "ringattn_hopper_backward with a bias and masks"): {90: (160, _WHILE_MASKING)},
    ("bfloat16", 96, "ringattn_hopper_backward with a bias and masks"): {90: (168, _WHILE_MASKING)},
    ("bfloat16", 72, "ringattn_hopper_backward with a bias and masks"): {90: (168, _WHILE_MASKING)},
    ("float16", 128, "ringattn_hopper_backward with a bias and masks"): {90: (184, _WHILE_MASKING)},
    ("bfloat16", 64, "ringattn_hopper_forward with slopes"): {90: (320, _FEW_A_STEP)},
    ("bfloat16", 192, "ringattn_hopper_backward"): {90: (16, _FETCHING)},
    ("bfloat16", 192, "ringattn_hopper_backward with masks"): {90: (32, _FETCHING)},
}
"""The budgets of Triton 3.9 where it spills more than `SPILLS` allows."""


def allowed(dtype: str, head_dim: int, kernel: str, target: int | str) -> tuple[int, str]:
    """The bound and its reason."""
    case = dtype, head_dim, kernel
    if triton_version() > (3, 6) and target in SPILLS_AFTER_3_6.get(case, {}):
        return SPILLS_AFTER_3_6[case][target]
    return SPILLS.get(case, {}).get(target, (0, "nothing may spill"))
