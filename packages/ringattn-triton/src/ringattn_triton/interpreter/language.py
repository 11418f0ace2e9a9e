# SPDX-License-Identifier: Apache-2.0
"""The functions of `triton.language` for memory, control flow and shapes, over NumPy arrays.

The same functions serve Gluon, whose calls also pass a `layout`; the functions ignore it. `mathematics` has the
functions that compute; `programs` substitutes both for `triton.language`.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from triton import language as tl

from . import assembly
from .types import held, poison, rounded
from .values import Pointer, Tensor, cast, constant, number, plain, tensor

current = threading.local()
"""The state of the program that runs in this thread; `current.launch` is its `programs.Launch`."""


def program_id(axis: int) -> Tensor:
    return Tensor(np.int32(current.launch.where[plain(axis)]), tl.int32)


def num_programs(axis: int) -> Tensor:
    return Tensor(np.int32(current.launch.grid[plain(axis)]), tl.int32)


def load(pointer: Any, mask: Any = None, other: Any = None, volatile: bool = False) -> Tensor:
    """Loads elements. Where `mask` is false, gives `other`, or if that is `None` NaN or the largest integer."""
    dtype, allowed = pointer.buffer.dtype, _mask(mask)
    if allowed is None:
        found = pointer.buffer.load(pointer.data, None, None)
        if volatile:
            current.team.looked((id(pointer.buffer), int(pointer.data), int(found)))
        return Tensor(found, dtype)
    if other is None:
        fill = poison(dtype)
    else:
        fill = number(other, dtype) if not isinstance(other, Tensor) else cast(other, dtype).data
    return Tensor(pointer.buffer.load(pointer.data, allowed, fill), dtype)


def store(pointer: Any, value: Any, mask: Any = None) -> None:
    data = cast(tensor(value), pointer.buffer.dtype).data
    pointer.buffer.store(pointer.data, data, _mask(mask))


def atomic_add(pointer: Any, val: Any, sem: Any = None) -> Tensor:
    dtype = pointer.buffer.dtype
    return Tensor(pointer.buffer.add(pointer.data, cast(tensor(val), dtype).data, True), dtype)


def _mask(mask: Any) -> Any:
    mask = constant(mask)
    if mask is None or mask is True:
        return None
    return cast(tensor(mask), tl.int1).data


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    return Tensor(np.arange(plain(start), plain(end), dtype=np.int32), tl.int32)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    sizes = _sizes(shape)
    data = cast(value, dtype).data if isinstance(value, Tensor) else rounded(held(dtype)(constant(value)), dtype)
    return Tensor(np.full(sizes, data, held(dtype)) if sizes else data, dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype)


def reshape(input: Tensor, *shape: Any) -> Tensor:
    return input._like(np.reshape(input.data, _sizes(shape)))


def permute(input: Tensor, *dims: Any) -> Tensor:
    return input._like(np.transpose(input.data, _sizes(dims)))


def trans(input: Tensor) -> Tensor:
    return permute(input, 1, 0)


def join(a: Any, b: Any) -> Tensor:
    """Stacks `a` and `b` along a new last axis."""
    a, b = tensor(a), tensor(b)
    return Tensor(np.stack(np.broadcast_arrays(a.data, b.data), axis=-1), a.dtype)


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    return a._like(a.data[..., 0]), a._like(a.data[..., 1])


def range_(arg1: Any, arg2: Any = None, step: Any = None, **_: Any) -> Iterator[Any]:
    """The `range` of a loop in a kernel: gives the loop variable as tensors, as a compiled kernel does."""
    start, end = (0, arg1) if arg2 is None else (arg1, arg2)
    bounds = [int(constant(b).__index__()) for b in (start, end, 1 if step is None else step)]
    for value in range(*bounds):
        yield Tensor(np.int32(value), tl.int32)


def static_range(arg1: Any, arg2: Any = None, step: Any = None) -> range:
    """The range of an unrolled loop: its bounds and its variable are integers known at compile time."""
    start, end = (0, arg1) if arg2 is None else (arg1, arg2)
    return range(plain(start), plain(end), 1 if step is None else plain(step))


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Tensor | tuple[Tensor, ...]:
    """Interprets inline PTX for each element of `args`: 32-bit instructions, or 32-bit stores through pointers."""
    several = isinstance(dtype, tuple)
    dtypes = dtype if several else (dtype,)
    inputs = [_Words(x) if isinstance(x, Pointer) else tensor(x).data for x in args]
    found = assembly.computed(asm, inputs, len(dtypes))
    results = tuple(Tensor(x, kind) for x, kind in zip(found, dtypes, strict=True))
    return results if several else results[0]


class _Words:
    """A pointer to 16-bit numbers, for stores of 32-bit words: each word has two numbers, the first in its low half."""

    def __init__(self, pointer: Pointer) -> None:
        self.pointer = pointer

    def write(self, words: Any) -> tuple[()]:
        places, buffer = self.pointer.data, self.pointer.buffer
        if buffer.dtype.primitive_bitwidth != 16 or (places % 2).any():
            raise ValueError(f"words of 32 bits cover no two numbers of {buffer}")
        for place in range(2):
            half = Tensor((words >> (16 * place) & 0xFFFF).astype(np.uint16), tl.uint16)
            buffer.store(places + place, half.to(buffer.dtype, bitcast=True).data, None)
        return ()


def _sizes(shape: Any) -> tuple[int, ...]:
    """Converts a shape, given as one sequence or as several arguments, to a tuple of integers."""
    if isinstance(shape, tuple) and len(shape) == 1 and isinstance(shape[0], list | tuple):
        shape = shape[0]
    return tuple(plain(size) for size in shape)
