# SPDX-License-Identifier: Apache-2.0
"""Heads whose masks are alike share one mask: a program evaluates, and a kernel reads, each distinct mask once."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from ringattn_core.masks import Causal, Local, Mask, Predicate
from ringattn_core.masks.builder import build

HEADS, LENGTH = 4, 8
TABLE = jnp.arange(LENGTH)


def of_heads(mask: Callable[[int], Mask]) -> tuple[int, ...]:
    """The number of each head's mask. `mask` makes the mask of a head."""
    built = build(lambda q, kv, heads, head, reps: mask(head), LENGTH, LENGTH, HEADS, HEADS)
    assert max(built.of_head) + 1 == len(built.masks)
    return built.of_head


def step(size: Any) -> Mask:
    return Predicate(lambda i, j: (i - j) % size == 0)


def by_table(table: Any) -> Mask:
    return Predicate(lambda i, j: table[i] >= table[j])


def without_value() -> Mask:
    mask = Predicate(lambda i, j: i - j == late)
    if mask.bounded:
        late = 0
    return mask


def from_elsewhere(offset: int) -> Mask:
    return Predicate(eval("lambda i, j: i - j >= OFFSET", {"OFFSET": offset}))


ALIKE: dict[str, Callable[[int], Mask]] = {
    "a function made anew": lambda _: Predicate(lambda i, j: i >= j),
    "one that captured a number": lambda _: step(3),
    "one that captured an array": lambda _: by_table(TABLE),
    "one with a default": lambda _: Predicate(lambda i, j, size=2: (i - j) % size == 0),
    "inside other masks": lambda _: ~(step(2) | Local(1)) & Causal(),
}
DIFFERENT: dict[str, Callable[[int], Mask]] = {
    "captured numbers differ": step,
    "captured numbers differ in their type": lambda head: step([1, 1.0, True, 2][head]),
    "captured arrays differ": lambda head: by_table(TABLE + head),
    "defaults differ": lambda head: Predicate(lambda i, j, head=head: i - j >= head),
    "keyword defaults differ": lambda head: Predicate(lambda i, j, *, head=head: i - j >= head),
    "a captured variable has no value": lambda _: without_value(),
    "globals differ": from_elsewhere,
    "other masks differ": lambda head: step(2) & Local(head),
}


@pytest.mark.parametrize("name", ALIKE)
def test_heads_share_a_mask_that_is_made_anew_for_each(name: str) -> None:
    assert of_heads(ALIKE[name]) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", DIFFERENT)
def test_heads_keep_masks_that_may_differ(name: str) -> None:
    assert of_heads(DIFFERENT[name]) == (0, 1, 2, 3)


def test_each_head_gets_the_mask_that_was_made_for_it() -> None:
    assert of_heads(lambda head: step(2) if head % 2 else Causal()) == (0, 1, 0, 1)
    built = build(lambda q, kv, heads, head, reps: step(3 - head // 2), LENGTH, LENGTH, HEADS, HEADS)
    assert built.of_head == (0, 0, 1, 1)
    where = jnp.arange(LENGTH)[:, None], jnp.arange(LENGTH)[None]
    for mask, size in zip(built.masks, (3, 2), strict=True):
        assert isinstance(mask, Predicate)
        assert (mask.seen(*where) == ((where[0] - where[1]) % size == 0)).all()
