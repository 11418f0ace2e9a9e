# SPDX-License-Identifier: Apache-2.0
"""Promises on heads of any multiple of 8 in the forward kernel for Hopper, which lie in one piece or two."""

from typing import Any

import pytest
import ringattn_xla.block
from given_blocks import make_block
from ringattn_triton.hopper import schedules
from test_hopper import HALF, check, half


@pytest.mark.parametrize(
    "dims",
    [
        *((72, 72), (80, 80), (96, 96), (120, 120), (248, 248), (256, 256)),
        *((192, 192), (160, 160), (176, 136), (192, 128), (136, 72), (192, 256), (256, 192)),
    ],
    ids=str,
)
def test_heads_of_any_multiple_of_8_lie_in_shared_memory_in_one_piece_or_two(dims: tuple[int, int]) -> None:
    given: dict[str, Any] = {"dim": dims[0], "value_dim": dims[1], "dtype": HALF, "causal": True}
    check(make_block(2, 200, 140, **given), str(dims))


@pytest.mark.parametrize("option", ["window", "causal segments", "dense mask", "slopes", "dropout"])
def test_values_in_two_pieces_go_with_every_other_option(option: str) -> None:
    check(half(option, 192, 200, 300), option)


@pytest.mark.parametrize("programs", [1, 132])
def test_the_only_place_of_the_second_piece_of_values_is_filled_anew_in_every_step_and_turn(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "PROGRAMS", programs)
    block = make_block(1, 512, 640, heads=2, kv_heads=1, dim=192, dtype=HALF, causal=True)
    check(block, "from nothing")
    others = make_block(1, 512, 64, heads=2, kv_heads=1, dim=192)
    check(block, "continued", ringattn_xla.block.KERNEL.forward(others, None))
