# SPDX-License-Identifier: Apache-2.0
"""Replaces the functions of `triton.language` that compute: elementwise, over an axis, and matrix products."""

from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language as tl

from .types import cut_to_tf32, rounded
from .values import Tensor, arithmetic, cast, constant, in_common_type, plain, tensor


def _wide(x: Any) -> Tensor:
    x = tensor(x)
    return cast(x, tl.float32) if x.dtype is tl.bfloat16 else x


def exp2(x: Tensor) -> Tensor:
    return Tensor(np.exp2(x.data), tl.float32)


def log2(x: Tensor) -> Tensor:
    return Tensor(np.log2(x.data), tl.float32)


def abs(x: Any) -> Tensor:
    x = tensor(x)
    return Tensor(np.abs(x.data), x.dtype)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    a, b, dtype = in_common_type(x, y)
    return Tensor(np.where(cast(tensor(condition), tl.int1).data, a, b)[()], dtype)


def maximum(x: Any, y: Any) -> Tensor:
    return arithmetic(np.fmax, _wide(x), _wide(y))


def minimum(x: Any, y: Any) -> Tensor:
    return arithmetic(np.fmin, _wide(x), _wide(y))


def dot(input: Tensor, other: Tensor, acc: Any = None, input_precision: Any = None) -> Tensor:
    """`input other + acc`, summed in float32. Cuts float32 inputs to TF32 unless `input_precision` asks for more."""
    a, b = input.data, other.data
    if input.dtype is tl.float32 and constant(input_precision) in (None, "tf32"):
        a, b = cut_to_tf32(a), cut_to_tf32(b)
    product = np.matmul(a, b)
    return Tensor(product if acc is None else product + acc.data, tl.float32)


def sum(input: Tensor, axis: Any = None) -> Tensor:
    """The sum over `axis` (`None`: all). As in Triton, small integers are summed as int32, and bfloat16 as float32."""
    kind = input.dtype
    if kind.is_int() and kind.int_bitwidth < 32:
        kind = tl.int32 if kind.is_int_signed() else tl.uint32
    return _reduced(np.add, cast(_wide(input), tl.float32 if kind is tl.bfloat16 else kind), axis)


def max(input: Tensor, axis: Any = None) -> Tensor:
    return _reduced(np.fmax, _wide(input), axis)


def min(input: Tensor, axis: Any = None) -> Tensor:
    return _reduced(np.fmin, _wide(input), axis)


def _reduced(function: Any, input: Tensor, axis: Any) -> Tensor:
    data = function.reduce(input.data, axis=None if axis is None else plain(axis))
    return Tensor(rounded(data, input.dtype), input.dtype)


def cumsum(input: Tensor, axis: Any = 0) -> Tensor:
    x = _wide(input)
    return Tensor(np.add.accumulate(x.data, plain(axis), x.data.dtype), x.dtype)


def associative_scan(input: Tensor, axis: Any, combine_fn: Callable[..., Any]) -> Tensor:
    """The running results along `axis`: result `i` combines elements 0 to `i` by `combine_fn`, from left to right."""
    axis = plain(axis)
    totals: list[Tensor] = []
    for i in range(input.shape[axis]):
        item = input._like(np.take(input.data, i, axis))
        totals.append(combine_fn(totals[-1], item) if totals else item)
    return input._like(np.stack([total.data for total in totals], axis))
