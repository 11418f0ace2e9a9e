# SPDX-License-Identifier: Apache-2.0
"""The Triton types of interpreted values: how operands are promoted, and which NumPy type holds each type's values.

Values of bfloat16 and float16 are held as float32 and rounded after every operation. Sums and products of two such
numbers are exact or correctly rounded in float32, so that rounding them again gives the result of the narrow type.
"""

import functools
from typing import Any, Final

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic

_INTEGER_NAMES: Final = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
HELD: Final[dict[str, Any]] = {
    **{name: getattr(np, name) for name in _INTEGER_NAMES},
    "int1": np.bool_,
    "fp16": np.float32,
    "bf16": np.float32,
    "fp32": np.float32,
}
OF_ARRAY: Final[dict[str, Any]] = {
    **{name: getattr(tl, name) for name in (*_INTEGER_NAMES, "float16", "bfloat16", "float32")},
    "bool": tl.int1,
}
"""The Triton type for the dtype name of a NumPy (or ml_dtypes) array."""


def held(dtype: Any) -> Any:
    """The NumPy type in which the interpreter holds values of a Triton type: float32 for bfloat16 and float16."""
    try:
        return HELD[dtype.name]
    except KeyError:
        raise TypeError(f"the interpreter has no values of type {dtype}; it has {', '.join(HELD)}") from None


def poison(dtype: Any) -> Any:
    """The value that fills uninitialised memory, so that a wrong read shows: NaN, the largest integer, or true."""
    kind = held(dtype)
    return kind(np.nan) if dtype.is_floating() else kind(1) if dtype.is_int1() else np.iinfo(kind).max


def rounded(data: Any, dtype: Any) -> Any:
    """Rounds float32 `data` to the numbers of bfloat16 or float16, ties to even; returns other types unchanged."""
    if dtype is tl.bfloat16:
        bits = data.view(np.uint32)
        nearest = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
        return np.where(data == data, nearest.view(np.float32), np.float32(np.nan))[()]
    if dtype is tl.float16:
        return data.astype(np.float16).astype(np.float32)
    return data


def cut_to_tf32(data: Any) -> Any:
    """Cuts float32 to the numbers of TF32 as Hopper's tensor cores do: they ignore the last 13 bits of an operand.

    No result is farther from zero than the number itself, so products of such operands are too small.
    """
    return (data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def decoded(array: np.ndarray) -> np.ndarray:
    """The elements of an array in row-major order, in the NumPy type of `held`; a view if no conversion is needed."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else flat


def of_number(value: bool | int | float) -> Any:
    """The Triton type of a Python number in a kernel's source. Raises for a float that would be float64."""
    if isinstance(value, bool):
        return tl.int1
    if isinstance(value, int):
        for dtype, low, high in _INTEGERS:
            if low <= value < high:
                return dtype
        raise ValueError(f"{value} fits no integer type; the widest is uint64")
    if np.isfinite(value) and value != 0 and not 2.0**-126 <= abs(value) < 2.0**128:
        raise ValueError(f"the compiler takes {value} as float64, which the interpreter does not have")
    return tl.float32


_INTEGERS: Final = (
    (tl.int32, -(2**31), 2**31),
    (tl.uint32, 2**31, 2**32),
    (tl.int64, -(2**63), 2**63),
    (tl.uint64, 2**63, 2**64),
)


_BY_NAME: Final[dict[str, Any]] = {dtype.name: dtype for dtype in OF_ARRAY.values()}  # pyright: ignore


_SEMANTIC: Final[Any] = TritonSemantic(None)  # pyright: ignore[reportArgumentType]


@functools.cache
def _common(a: str, a_number: bool, b: str, b_number: bool, division: bool) -> Any:
    return _SEMANTIC.computation_type_impl(_BY_NAME[a], a_number, _BY_NAME[b], b_number, division)


def integer_type(a: Any, b: Any) -> Any:
    """The common type of two integer types, by the promotion rules of Triton's compiler."""
    return a if a is b else _SEMANTIC.integer_promote_impl(a, b)


def common_type(a: Any, b: Any, a_number: bool = False, b_number: bool = False, division: bool = False) -> Any:
    """The type to which Triton converts two operands of types `a` and `b` before it combines them.

    `a_number`, `b_number`: that operand is a Python number. A number changes the type of a tensor only if the number is
    of a higher kind, as a float is beside an integer tensor. `division`: the operation is `/`, `//` or `%`.
    """
    if a is b and not division:
        return a
    return _common(a.name, a_number, b.name, b_number, division)
