# SPDX-License-Identifier: Apache-2.0
"""Which mask each head obeys: calls a `mask_builder` and converts its results to masks."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.core

from ..errors import InputError, RingAttnError, in_one_line
from .algebra import Mask
from .kinds import Numpy
from .reach import Reach

Builder = Callable[[int, int, int, int, int], Any]


@dataclasses.dataclass(frozen=True)
class Built:
    """The distinct masks, and for each global head its index in `masks`. Can itself be passed as a `mask_builder`."""

    masks: tuple[Mask, ...]
    of_head: tuple[int, ...]

    @property
    def reach(self) -> Reach:
        """What some head sees by differences of positions, or more."""
        return functools.reduce(operator.or_, (mask.reach for mask in self.masks)) if self.masks else Reach()

    def __call__(self, q_len: int, kv_len: int, num_heads: int, head_idx: int, num_reps: int) -> Mask:
        return self.masks[self.of_head[head_idx]]


def build(builder: Builder, q_length: int, kv_length: int, heads: int, key_heads: int) -> Built:
    """Calls the builder once for each global head; lengths and numbers of heads are global.

    Heads with equal masks share one. Masks compare by value, but a `Predicate` compares by its function's identity: so
    define the function once, not anew for each head.
    """
    if isinstance(builder, Built):
        return builder
    made = [_mask_of_head(builder, (q_length, kv_length, heads, head, heads // key_heads)) for head in range(heads)]
    numbers = {mask: number for number, mask in enumerate(dict.fromkeys(made))}
    return Built(tuple(numbers), tuple(numbers[mask] for mask in made))


def _mask_of_head(builder: Builder, arguments: tuple[int, int, int, int, int]) -> Mask:
    """The builder's result for one head as a `Mask`; raises if it is no mask, or has not the global lengths."""
    try:
        result = builder(*arguments)
    except RingAttnError:
        raise
    except (Exception, SystemExit) as error:
        fact = f"called with {arguments} it raised {in_one_line(error)}"
        remedy = "It needs (q_len, kv_len, num_heads, head_idx, num_reps) -> mask, for every head"
        raise InputError("mask_builder", fact, remedy) from error
    if isinstance(result, jax.core.Tracer):
        fact = f"returned a traced array of shape {result.shape}"
        remedy = "Make it with NumPy, as jax.numpy traces inside jit, or pass it as attention_mask"
        raise InputError("mask_builder", fact, remedy)
    lengths = arguments[:2]
    if not isinstance(result, Mask):
        if not (hasattr(result, "shape") and hasattr(result, "__getitem__")):
            remedy = "Return a mask of ringattn_core.masks, or anything with .shape and [rows, cols] -> bool"
            raise InputError("mask_builder", f"returned {type(result).__name__}", remedy)
        _refuse_other_shape(result.shape, lengths)
        result = Numpy(result[slice(0, lengths[0]), slice(0, lengths[1])])
    for shape in result.shapes():
        _refuse_other_shape(shape, lengths)
    return result


def _refuse_other_shape(shape: Sequence[int], lengths: tuple[int, int]) -> None:
    if tuple(shape) != lengths:
        raise InputError(
            "mask_builder", f"returned a mask of shape {tuple(shape)}", f"The global lengths are {lengths}"
        )
