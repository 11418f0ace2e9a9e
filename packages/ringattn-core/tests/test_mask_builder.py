# SPDX-License-Identifier: Apache-2.0
"""Heads whose masks are equal share one mask, and masks and builders refuse wrong arguments with a remedy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention
from ringattn_core.errors import InputError
from ringattn_core.masks import Causal, Chunked, Coordinates, Document, Full, Local, Mask, Numpy, Predicate
from ringattn_core.masks.builder import Built, build
from ringattn_testing.rings import close, query_key_value

HEADS, LENGTH = 4, 8
TABLE = np.tri(LENGTH, dtype=bool)
STEPS = [Predicate(lambda i, j, size=size: (i - j) % size == 0) for size in range(1, 5)]


def of_heads(mask: Callable[[int], Any]) -> Built:
    """The masks of all heads. `mask` makes the mask of a head."""
    return build(lambda q, kv, heads, head, reps: mask(head), LENGTH, LENGTH, HEADS, HEADS)


def test_each_head_gets_the_mask_that_was_made_for_it_and_equal_masks_are_one() -> None:
    assert of_heads(lambda head: STEPS[1] if head % 2 else Causal()).of_head == (0, 1, 0, 1)
    assert of_heads(lambda _: TABLE.copy()).of_head == (0, 0, 0, 0)
    built = of_heads(lambda head: STEPS[2 - head // 2])
    assert built.of_head == (0, 0, 1, 1) and built.masks == (STEPS[2], STEPS[1])


def test_heads_whose_masks_are_intervals_see_by_their_own() -> None:
    """Equal masks need not be neighbours: here heads 0 and 3 share one."""
    query, key, value = query_key_value(1, LENGTH, HEADS, HEADS)
    local = np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-2, dtype=bool)
    dense = np.stack([local if head in (1, 2) else np.tri(LENGTH, dtype=bool) for head in range(HEADS)])[None]
    built = ring_attention(
        query, key, value, mask_builder=lambda q, kv, heads, head, reps: Local(1, 0) if head in (1, 2) else Causal()
    )
    close(built, ring_attention(query, key, value, attention_mask=jnp.asarray(dense)))


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


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "and": (lambda: Causal() and Full(), "mask: Causal has no truth value"),
    "a chunk beyond int32": (lambda: Chunked(2**31), "Chunked(size=...): got 2147483648"),
    "documents of two axes": (lambda: Document(IDS, IDS[None]), "Document(kv_ids=...): got int64 of shape (1, 4)"),
    "documents beyond int32": (lambda: Document(IDS + 2**31), "Document(q_ids=...): has values from 2147483648"),
    "a traced array": (lambda: jax.jit(lambda x: Numpy(x) and x)(HOST), "Numpy: is traced"),
    "an array to be added": (lambda: Numpy(np.where(HOST, 0.0, -np.inf)), "Numpy: got float64 of shape (4, 4)"),
    "a number": (lambda: Predicate(3), "Predicate: got 3"),  # pyright: ignore[reportArgumentType]
    "NumPy and": (lambda: HOST & Causal(), "mask: got ndarray"),
    "raises": (lambda: built(fails), "mask_builder: called with (4, 4, 2, 0, 2) it raised KeyError"),
    "traced": (
        lambda: jax.jit(lambda x: built(lambda *_: x) and x)(HOST),
        "mask_builder: returned a traced array of shape (4, 4)",
    ),
    "predicate and": (lambda: traced(lambda i, j: i >= j and j >= 0), "takes the truth value of an array"),
    "predicate on the host": (
        lambda: Predicate(lambda i, j: 0 <= i <= j).visible(*[Coordinates(np.arange(T), np.arange(T))] * 2),
        "takes the truth value of an array",
    ),
    "predicate NumPy": (lambda: traced(lambda i, j: np.asarray(i) >= j), "to a NumPy function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    make, fact = REFUSED[name]
    with pytest.raises(InputError) as error:
        make()
    assert fact in str(error.value)
    if name == "raises":
        assert isinstance(error.value.__cause__, KeyError)
