# SPDX-License-Identifier: Apache-2.0
"""Heads whose masks are equal share one mask: a program evaluates, and a kernel reads, each distinct mask once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ringattn_core.masks import Causal, Local, Predicate
from ringattn_core.masks.builder import build

HEADS, LENGTH = 4, 8
TABLE = np.tri(LENGTH, dtype=bool)
STEPS = [Predicate(lambda i, j, size=size: (i - j) % size == 0) for size in range(1, 5)]


def of_heads(mask: Callable[[int], Any]) -> tuple[int, ...]:
    """The number of each head's mask. `mask` makes the mask of a head."""
    built = build(lambda q, kv, heads, head, reps: mask(head), LENGTH, LENGTH, HEADS, HEADS)
    assert max(built.of_head) + 1 == len(built.masks)
    return built.of_head


EQUAL: dict[str, Callable[[int], Any]] = {
    "kinds": lambda _: ~(Local(1, 2) | Causal()) & Causal(1),
    "arrays": lambda _: TABLE.copy(),
    "a function": lambda _: STEPS[0] & Causal(),
}
DIFFERENT: dict[str, Callable[[int], Any]] = {
    "kinds": lambda head: Causal() | Local(head),
    "arrays": lambda head: np.roll(TABLE, head),
    "functions": lambda head: STEPS[head],
    "functions made anew": lambda head: Predicate(lambda i, j: i >= j),
}


@pytest.mark.parametrize("name", EQUAL)
def test_heads_share_an_equal_mask(name: str) -> None:
    assert of_heads(EQUAL[name]) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", DIFFERENT)
def test_heads_keep_masks_that_may_differ(name: str) -> None:
    assert of_heads(DIFFERENT[name]) == (0, 1, 2, 3)


def test_each_head_gets_the_mask_that_was_made_for_it() -> None:
    assert of_heads(lambda head: STEPS[1] if head % 2 else Causal()) == (0, 1, 0, 1)
    built = build(lambda q, kv, heads, head, reps: STEPS[2 - head // 2], LENGTH, LENGTH, HEADS, HEADS)
    assert built.of_head == (0, 0, 1, 1) and built.masks == (STEPS[2], STEPS[1])
