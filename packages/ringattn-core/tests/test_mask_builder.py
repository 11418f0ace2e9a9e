# SPDX-License-Identifier: Apache-2.0
"""Heads whose masks are equal share one mask, and masks and builders refuse wrong arguments with a remedy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.errors import InputError
from ringattn_core.masks import Causal, Chunked, Coordinates, Document, Full, Local, Mask, Numpy, Predicate
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


T = 4
HOST = np.ones((T, T), bool)
IDS = np.arange(T)


def traced(seen: Callable[[Any, Any], Any]) -> Any:
    where = Coordinates(jnp.arange(T), jnp.arange(T))
    return jax.jit(lambda: Predicate(seen).visible(*jax.lax.optimization_barrier((where.rows(), where.columns()))))()


def built(builder: Any) -> Any:
    return build(builder, T, T, 2, 1)


def fails(*_: int) -> Mask:
    raise KeyError("no such head")


AND = "Combine masks with `&`, `|` and `~`"
ARRAY = "wrap an array in masks.Numpy"
JNP = "Use `&`, `|`, `~` and functions of jax.numpy in it"
REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "and": (lambda: Causal() and Full(), "mask: Causal has no truth value", AND),
    "a chunk beyond int32": (lambda: Chunked(2**31), "Chunked(size=...): got 2147483648", "It needs"),
    "documents of two axes": (lambda: Document(IDS, IDS[None]), "Document(kv_ids=...): got int64 of shape (1, 4)", ""),
    "documents beyond int32": (lambda: Document(IDS + 2**31), "Document(q_ids=...): has values from 2147483648", ""),
    "a traced array": (lambda: jax.jit(lambda x: Numpy(x) and x)(HOST), "Numpy: is traced", ""),
    "an array to be added": (lambda: Numpy(np.where(HOST, 0.0, -np.inf)), "Numpy: got float64 of shape (4, 4)", ""),
    "a number": (lambda: Predicate(3), "Predicate: got 3", "It needs a function"),  # pyright: ignore[reportArgumentType]
    "NumPy and": (lambda: HOST & Causal(), "mask: got ndarray", ARRAY),
    "raises": (lambda: built(fails), "mask_builder: called with (4, 4, 2, 0, 2) it raised KeyError", "-> mask"),
    "traced": (
        lambda: jax.jit(lambda x: built(lambda *_: x) and x)(HOST),
        "mask_builder: returned a traced array of shape (4, 4)",
        "Make it with NumPy",
    ),
    "predicate and": (lambda: traced(lambda i, j: i >= j and j >= 0), "takes the truth value of an array", JNP),
    "predicate on the host": (
        lambda: Predicate(lambda i, j: 0 <= i <= j).visible(*[Coordinates(np.arange(T), np.arange(T))] * 2),
        "takes the truth value of an array",
        JNP,
    ),
    "predicate NumPy": (lambda: traced(lambda i, j: np.asarray(i) >= j), "to a NumPy function", "jax.numpy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_and_what_to_do(name: str) -> None:
    make, fact, remedy = REFUSED[name]
    with pytest.raises(InputError) as error:
        make()
    assert fact in str(error.value) and remedy in str(error.value)
    if name == "raises":
        assert isinstance(error.value.__cause__, KeyError)
