# SPDX-License-Identifier: Apache-2.0
"""Which mask each head obeys: calls a `mask_builder` and converts its results to masks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.core
import numpy as np

from ..errors import InputError, RingAttnError, in_one_line
from .algebra import Mask
from .kinds import Numpy

Builder = Callable[[int, int, int, int, int], Any]


@dataclasses.dataclass(frozen=True)
class Built:
    """The distinct masks, and for each global head the number of its mask. Can itself be used as a `mask_builder`."""

    masks: tuple[Mask, ...]
    of_head: tuple[int, ...]

    def __call__(self, q_len: int, kv_len: int, num_heads: int, head_idx: int, num_reps: int) -> Mask:
        return self.masks[self.of_head[head_idx]]


def build(builder: Builder, q_length: int, kv_length: int, heads: int, key_heads: int) -> Built:
    """Calls the builder once for each global head; lengths and numbers of heads are global.

    Masks compare by value, and a `Predicate` by its function: make the function once, not anew for each head.
    """
    if isinstance(builder, Built):
        return builder
    asked = (_asked(builder, q_length, kv_length, heads, head, heads // key_heads) for head in range(heads))
    made = [_as_mask(result, (q_length, kv_length)) for result in asked]
    numbers = {mask: number for number, mask in enumerate(dict.fromkeys(made))}
    return Built(tuple(numbers), tuple(numbers[mask] for mask in made))


def _asked(builder: Builder, q_length: int, kv_length: int, heads: int, head: int, num_reps: int) -> Any:
    try:
        return builder(q_length, kv_length, heads, head, num_reps)
    except RingAttnError:
        raise
    except (Exception, SystemExit) as error:
        called = f"({q_length}, {kv_length}, {heads}, {head}, {num_reps})"
        raise InputError(
            "mask_builder",
            f"called with {called} it raised {in_one_line(error)}",
            "It needs (q_len, kv_len, num_heads, head_idx, num_reps) -> mask, for every head",
        ) from error


def _not_traced(array: Any) -> Any:
    if isinstance(array, jax.core.Tracer):
        raise InputError(
            "mask_builder",
            f"returned a traced array of shape {array.shape}",
            "Make it with NumPy, as jax.numpy traces inside jit, or pass it as attention_mask",
        )
    return array


def _as_mask(result: Any, shape: tuple[int, int]) -> Mask:
    _not_traced(result)
    if isinstance(result, Mask):
        held = result.shapes()
    elif hasattr(result, "shape") and hasattr(result, "__getitem__"):
        held = (tuple(result.shape),)
    else:
        raise InputError(
            "mask_builder",
            f"returned {type(result).__name__}",
            "Return a mask of ringattn_core.masks, or anything with .shape and [rows, cols] -> bool",
        )
    for one in held:
        if tuple(one) != shape:
            raise InputError(
                "mask_builder", f"returned a mask of shape {tuple(one)}", f"The global lengths are {shape}"
            )
    if isinstance(result, Mask):
        return result
    dense = np.asarray(_not_traced(result[slice(0, shape[0]), slice(0, shape[1])]))
    if dense.shape != shape:
        raise InputError("mask_builder", f"its mask[rows, cols] has shape {dense.shape}", f"It needs {shape}")
    return Numpy(dense)
