# SPDX-License-Identifier: Apache-2.0
"""Promises on heads of any multiple of 8 in the forward kernel for Hopper: in one piece or two, and their results."""

import dataclasses
from typing import Any

import pytest
import ringattn_xla.block
from given_blocks import make_block
from ringattn_triton.hopper import family, schedules
from test_hopper import HALF, TOLERANCE, check, computed, half, near


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


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(("q_length", "kv_length", "causal"), [(500, 150, True), (500, 640, False), (640, 640, True)])
def test_final_results_are_right_past_the_end_of_a_batch_row_and_over_several_turns(
    q_length: int, kv_length: int, causal: bool, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave through shared memory; the last tile of a row must not reach into the next row.

    With 640 keys some turns have three and more tiles without a mask: those store the results of the turn before.
    """
    monkeypatch.setattr(family, "_too_little", lambda constants: False)
    monkeypatch.setattr(schedules, "PROGRAMS", 1)
    block = make_block(2, q_length, kv_length, heads=1, kv_heads=1, dim=dim, dtype=HALF, causal=causal)
    got = computed(dataclasses.replace(block, final=True))
    want = ringattn_xla.block.KERNEL.forward(block, None)
    assert got.out.dtype == HALF
    near("out", got.out, want.out, TOLERANCE["bfloat16"])
    near("lse", got.lse, want.lse, TOLERANCE["float32"])
