# SPDX-License-Identifier: Apache-2.0
"""Whoever follows the backward pass of a block goes through few rooms, and seldom back."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import ringattn_triton
from given_blocks import make_block
from ringattn_triton.block_kernel import KERNEL

_PACKAGE = ringattn_triton.__path__[0] + "/"


def room(code: Any) -> str | None:
    """The file of a function; the folder `launch` is one room. Comprehensions and lambdas are no steps."""
    if not code.co_filename.startswith(_PACKAGE) or code.co_name.startswith("<"):
        return None
    path = code.co_filename.removeprefix(_PACKAGE)
    return "launch" if path.startswith("launch/") else path


def test_backward_passes_through_ten_rooms_and_returns_twelve_times() -> None:
    block = make_block(1, 64, 64, dim=64, dtype=jnp.bfloat16, causal=True)
    rows = jnp.zeros((1, 2, 64))
    way: list[str] = []
    rooms: set[str] = set()
    returns: set[tuple[str, str]] = set()

    def follow(frame: Any, event: str, _: Any) -> None:
        here = room(frame.f_code)
        if here is None or event not in ("call", "return"):
            return
        if event == "call":
            rooms.add(here)
            way.append(here)
        elif way:
            way.pop()
            if way and way[-1] != here:
                returns.add((here, way[-1]))

    jax.clear_caches()
    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        jax.make_jaxpr(KERNEL.backward)(block, block.q, rows, rows, None)
    finally:
        sys.setprofile(before)
    assert "portable/backward.py" in rooms
    assert len(rooms) <= 10, sorted(rooms)
    assert len(returns) <= 12, sorted(returns)
