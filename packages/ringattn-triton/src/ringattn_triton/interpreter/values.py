# SPDX-License-Identifier: Apache-2.0
"""Tensors and pointers of interpreted kernels, over NumPy arrays, with Python's operators."""

import functools
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import triton.language as tl

from .memory import Buffer
from .types import HELD, common_type, held, integer_type, of_number, rounded

Number = bool | int | float


class Tensor:
    """A block of values, or one value, of a Triton type; `data` has type `types.held(dtype)` and is never changed."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: Any, dtype: Any) -> None:
        self.data = data
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def numel(self) -> int:
        return self.data.size

    def to(self, dtype: Any, bitcast: bool = False) -> "Tensor":
        return bitcasted(self, dtype) if bitcast else cast(self, dtype)

    def __getitem__(self, index: Any) -> "Tensor":
        return self._like(np.asarray(self.data)[index])

    def _like(self, data: Any) -> "Tensor":
        return Tensor(data, self.dtype)

    def __bool__(self) -> bool:
        return bool(self.data.item())

    def __index__(self) -> int:
        return operator.index(self.data.item())

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.data}"

    def __add__(self, other: Any) -> "Tensor":
        return other + self if isinstance(other, Pointer) else arithmetic(np.add, self, other)

    def __neg__(self) -> "Tensor":
        return Tensor(np.negative(self.data), self.dtype)

    def __invert__(self) -> "Tensor":
        return Tensor(np.invert(self.data), self.dtype)


class Pointer(Tensor):
    """A block of pointers into one buffer; `data` holds their offsets from the buffer's beginning, in elements."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: Buffer, data: Any) -> None:
        super().__init__(data, tl.pointer_type(buffer.dtype) if buffer.pointer is None else buffer.pointer)
        buffer.pointer = self.dtype
        self.buffer = buffer

    def _like(self, data: Any) -> "Pointer":
        return Pointer(self.buffer, data)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.buffer, np.add(self.data, _offsets(other)))

    __radd__ = __add__

    __hash__ = Tensor.__hash__


def _offsets(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, Pointer) and value.dtype.is_int():
        return value.data.astype(np.int64) if value.dtype is tl.uint64 else value.data
    if isinstance(value, int):
        return value
    raise TypeError(f"a pointer can be moved only by integers, got {value!r}")


def tensor(value: Any) -> Tensor:
    """Converts a Python number in a kernel's source to a `Tensor`, as Triton does; returns a `Tensor` unchanged."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Number):
        dtype: Any = of_number(value)
        return Tensor(HELD[dtype.name](value), dtype)
    raise TypeError(f"a kernel cannot compute with {value!r}")


_numbers: Final[dict[tuple[Any, ...], Any]] = {}


def number(value: Number, dtype: Any) -> Any:
    """Converts a Python number to Triton type `dtype`, that of the tensor with which a kernel combines the number."""
    key = (value, type(value), dtype.name)
    found = _numbers.get(key) if value else None
    if found is None:
        found = _numbers[key] = rounded(held(dtype)(value), dtype)
    return found


def cast(x: Tensor, dtype: Any) -> Tensor:
    """Converts `x` to type `dtype`: floats to integers by truncation, floats to narrower floats by rounding to even."""
    if x.dtype is dtype:
        return x
    if dtype.is_int1():
        return Tensor(x.data != 0, tl.int1)
    kind = held(dtype)
    data = x.data if x.data.dtype == kind else x.data.astype(kind)
    return Tensor(rounded(data, dtype), dtype)


def bitcasted(x: Tensor, dtype: Any) -> Tensor:
    """Reinterprets the bits of `x` as another type of the same width."""
    data = x.data
    if x.dtype is tl.bfloat16:
        data = (data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    elif x.dtype is tl.float16:
        data = data.astype(np.float16)
    if dtype is tl.bfloat16:
        return Tensor((data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32), dtype)
    if dtype is tl.float16:
        return Tensor(data.view(np.float16).astype(np.float32), dtype)
    return Tensor(data.view(held(dtype)), dtype)


def in_common_type(a: Any, b: Any, division: bool = False) -> tuple[Any, Any, Any]:
    """Converts both operands to their common type. Returns the two as NumPy data, and the type."""
    if isinstance(a, Tensor):
        if isinstance(b, Tensor):
            dtype = common_type(a.dtype, b.dtype, division=division)
            return cast(a, dtype).data, cast(b, dtype).data, dtype
        dtype = common_type(a.dtype, of_number(b), b_number=True, division=division)
        return cast(a, dtype).data, number(b, dtype), dtype
    if isinstance(b, Tensor):
        dtype = common_type(of_number(a), b.dtype, a_number=True, division=division)
        return number(a, dtype), cast(b, dtype).data, dtype
    a, b = tensor(a), tensor(b)
    return in_common_type(a, b, division)


def arithmetic(function: Callable[..., Any], a: Any, b: Any) -> Tensor:
    """Applies `function` to both operands in their common type, and rounds the result to that type."""
    if type(a) is Tensor and type(b) is Tensor and a.dtype is b.dtype:
        x, y, dtype = a.data, b.data, a.dtype
    elif isinstance(a, Pointer) or isinstance(b, Pointer):
        raise TypeError(f"{function.__name__} does not take pointers")
    else:
        x, y, dtype = in_common_type(a, b)
    if dtype.is_int1():
        return Tensor((function(x.astype(np.int8), y.astype(np.int8)) & 1).astype(np.bool_), dtype)
    return Tensor(rounded(function(x, y), dtype), dtype)


def compared(function: Callable[..., Any], a: Any, b: Any) -> Tensor:
    x, y, _ = in_common_type(a, b)
    return Tensor(function(x, y), tl.int1)


def divided(a: Any, b: Any) -> Tensor:
    """The quotient `a / b` with at least one float; raises for two integers, which Triton would convert to floats."""
    x, y, dtype = in_common_type(a, b, division=True)
    if dtype.is_int():
        raise TypeError("the interpreter divides no integers by /: cast one of them to float32")
    return Tensor(np.divide(x, y), dtype)


def quotient(a: Any, b: Any) -> Tensor:
    """The quotient `a // b` of integers, rounded towards zero as processors do."""
    x, y, dtype = in_common_type(a, b, division=True)
    floor = np.floor_divide(x, y)
    if dtype.is_int_unsigned():
        return Tensor(floor, dtype)
    return Tensor(floor + ((floor < 0) & (floor * y != x)).astype(floor.dtype), dtype)


def remainder(a: Any, b: Any) -> Tensor:
    """The remainder `a % b` that belongs to `quotient`; it has the sign of `a`."""
    x, y, dtype = in_common_type(a, b, division=True)
    return Tensor(rounded(np.fmod(x, y), dtype), dtype)


def bitwise(function: Callable[..., Any], a: Any, b: Any) -> Tensor:
    a, b = tensor(a), tensor(b)
    dtype = integer_type(a.dtype, b.dtype)
    return Tensor(function(cast(a, dtype).data, cast(b, dtype).data), dtype)


def _operators() -> None:
    """Gives `Tensor` Python's operators, and the reflected forms of all but the comparisons.

    `__add__` is defined in the class, because it also takes a pointer as its right operand.
    """

    def defined(name: str, apply: Callable[[Any, Any], Tensor]) -> None:
        if name != "add":
            setattr(Tensor, f"__{name}__", lambda a, b: apply(a, b))
        setattr(Tensor, f"__r{name}__", lambda a, b: apply(b, a))

    for name, function in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        defined(name, functools.partial(arithmetic, function))
    for name, apply in {"truediv": divided, "floordiv": quotient, "mod": remainder}.items():
        defined(name, apply)
    of_bits = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    for name, function in (of_bits | {"lshift": np.left_shift, "rshift": np.right_shift}).items():
        defined(name, functools.partial(bitwise, function))
    comparisons = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for name, function in (comparisons | {"eq": np.equal, "ne": np.not_equal}).items():
        setattr(Tensor, f"__{name}__", lambda a, b, function=function: compared(function, a, b))


_operators()


def constant(value: Any) -> Any:
    """Unwraps a `tl.constexpr`; returns any other value unchanged."""
    return value.value if isinstance(value, tl.constexpr) else value


def plain(value: Any) -> int:
    """Converts an integer that is known at compile time to `int`; raises on a tensor."""
    value = constant(value)
    if isinstance(value, Tensor):
        raise TypeError(f"an integer known at compile time is needed here, got the tensor {value}")
    return operator.index(value)
