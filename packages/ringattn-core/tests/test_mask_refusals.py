# SPDX-License-Identifier: Apache-2.0
"""Masks and mask builders refuse wrong arguments, and each error says why and what to do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.errors import InputError
from ringattn_core.masks import Causal, Chunked, Coordinates, Document, Full, Local, Mask, Numpy, Predicate
from ringattn_core.masks.builder import build

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
    "a window beyond int32": (lambda: Local(3, 2**31), "Local(right=...): got 2147483648", "It needs"),
    "documents of two axes": (lambda: Document(IDS, IDS[None]), "Document(kv_ids=...): got int64 of shape (1, 4)", ""),
    "documents beyond int32": (lambda: Document(IDS + 2**31), "Document(q_ids=...): has values from 2147483648", ""),
    "a traced array": (lambda: jax.jit(lambda x: Numpy(x) and x)(HOST), "Numpy: is traced", ""),
    "an array to be added": (lambda: Numpy(np.where(HOST, 0.0, -np.inf)), "Numpy: got float64 of shape (4, 4)", ""),
    "a number": (lambda: Predicate(3), "Predicate: got 3", "It needs a function"),  # pyright: ignore[reportArgumentType]
    "nothing returned": (lambda: traced(lambda i, j: None), "returned NoneType", "It needs booleans"),
    "NumPy and": (lambda: HOST & Causal(), "mask: got ndarray", ARRAY),
    "raises": (lambda: built(fails), "mask_builder: called with (4, 4, 2, 0, 2) it raised KeyError", "-> mask"),
    "traced": (
        lambda: jax.jit(lambda x: built(lambda *_: x) and x)(HOST),
        "mask_builder: returned a traced array of shape (4, 4)",
        "Make it with NumPy",
    ),
    "predicate and": (lambda: traced(lambda i, j: i >= j and j >= 0), "takes the truth value of an array", JNP),
    "predicate NumPy": (lambda: traced(lambda i, j: np.asarray(i) >= j), "to a NumPy function", "jax.numpy"),
    "predicate on the host": (
        lambda: Predicate(lambda i, j: 0 <= i <= j).visible(*[Coordinates(np.arange(T), np.arange(T))] * 2),
        "takes the truth value of an array",
        JNP,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_and_what_to_do(name: str) -> None:
    make, fact, remedy = REFUSED[name]
    with pytest.raises(InputError) as error:
        make()
    assert fact in str(error.value) and remedy in str(error.value)
    if name == "raises":
        assert isinstance(error.value.__cause__, KeyError)
