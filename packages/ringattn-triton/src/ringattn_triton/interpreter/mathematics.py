# SPDX-License-Identifier: Apache-2.0
"""What the functions of `triton.language` compute: elementwise, over an axis, and products of matrices."""

from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language as tl

from .types import rounded, to_tf32
from .values import Tensor, arithmetic, cast, constant, divided, met, plain, tensor

_HALVES = (tl.float16, tl.bfloat16)


def _wide(x: Any) -> Tensor:
    x = tensor(x)
    return cast(x, tl.float32) if x.dtype is tl.bfloat16 else x


def _of_float(function: Callable[[Any], Any], name: str) -> Callable[[Any], Tensor]:
    def apply(x: Any) -> Tensor:
        x = tensor(x)
        if x.dtype not in (tl.float32, tl.float64):
            raise TypeError(f"{name} takes float32 or float64, got {x.dtype}; cast it first")
        return Tensor(function(x.data), x.dtype)

    return apply


exp = _of_float(np.exp, "exp")
exp2 = _of_float(np.exp2, "exp2")
log = _of_float(np.log, "log")
log2 = _of_float(np.log2, "log2")
sqrt = sqrt_rn = _of_float(np.sqrt, "sqrt")
rsqrt = _of_float(lambda x: (1 / np.sqrt(x)).astype(x.dtype), "rsqrt")
sin = _of_float(np.sin, "sin")
cos = _of_float(np.cos, "cos")
floor = _of_float(np.floor, "floor")
ceil = _of_float(np.ceil, "ceil")
sigmoid = _of_float(lambda x: (1 / (1 + np.exp(-x))).astype(x.dtype), "sigmoid")


def abs(x: Any) -> Tensor:
    x = tensor(x)
    return Tensor(np.abs(x.data), x.dtype)


def fdiv(x: Any, y: Any, ieee_rounding: bool = False) -> Tensor:
    return divided(x, y)


div_rn = fdiv


def fma(x: Any, y: Any, z: Any) -> Tensor:
    """Rounded once, as far as float64 holds the product."""
    x, y, z = tensor(x), tensor(y), tensor(z)
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return Tensor(rounded(np.asarray(exact).astype(z.data.dtype)[()], z.dtype), z.dtype)


def umulhi(x: Any, y: Any) -> Tensor:
    """The high half of the product of two unsigned numbers."""
    a, b, dtype = met(x, y)
    if dtype not in (tl.int32, tl.uint32):
        raise TypeError(f"umulhi is interpreted for 32 bits, got {dtype}")
    product = a.view(np.uint32).astype(np.uint64) * b.view(np.uint32).astype(np.uint64)
    return Tensor((product >> np.uint64(32)).astype(np.uint32).view(a.dtype), dtype)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    if isinstance(x, Tensor) and x.dtype.is_ptr():
        if tensor(condition).data.ndim or x.dtype != y.dtype:
            raise TypeError("where chooses between values, or by one truth between pointers of one type")
        return x if bool(tensor(condition).data) else y
    a, b, dtype = met(x, y)
    return Tensor(np.where(cast(tensor(condition), tl.int1).data, a, b)[()], dtype)


def maximum(x: Any, y: Any, propagate_nan: Any = None) -> Tensor:
    return arithmetic(np.maximum if _propagates(propagate_nan) else np.fmax, _wide(x), _wide(y))


def minimum(x: Any, y: Any, propagate_nan: Any = None) -> Tensor:
    return arithmetic(np.minimum if _propagates(propagate_nan) else np.fmin, _wide(x), _wide(y))


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = None) -> Tensor:
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def _propagates(option: Any) -> bool:
    return option is not None and option == tl.PropagateNan.ALL


def add(x: Any, y: Any, sanitize_overflow: bool = True) -> Tensor:
    return arithmetic(np.add, x, y)


def sub(x: Any, y: Any, sanitize_overflow: bool = True) -> Tensor:
    return arithmetic(np.subtract, x, y)


def mul(x: Any, y: Any, sanitize_overflow: bool = True) -> Tensor:
    return arithmetic(np.multiply, x, y)


def dot(
    input: Tensor,
    other: Tensor,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: Any = tl.float32,
) -> Tensor:
    """The product of two blocks, summed in float32. float32 inputs are cut to TF32 unless the caller asks otherwise."""
    if input.dtype != other.dtype:
        raise TypeError(f"dot takes two blocks of one type, got {input.dtype} and {other.dtype}")
    if input.data.ndim != other.data.ndim or input.data.ndim not in (2, 3):
        raise TypeError(f"dot takes two matrices, got shapes {input.shape} and {other.shape}")
    if input.dtype not in (tl.float32, *_HALVES):
        raise TypeError(f"dot is interpreted for float32, float16 and bfloat16, got {input.dtype}")
    if input.shape[-1] < 16:
        raise ValueError(f"dot sums over at least 16 elements, got shapes {input.shape} and {other.shape}")
    a, b = input.data, other.data
    if input.dtype is tl.float32 and _precision(constant(input_precision), constant(allow_tf32)) == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    product = np.matmul(a, b)
    if acc is not None:
        if acc.shape != product.shape:
            raise ValueError(f"the accumulator of dot has shape {acc.shape}, the product {product.shape}")
        return Tensor(rounded(product + acc.data, acc.dtype), acc.dtype)
    return Tensor(rounded(product, out_dtype), out_dtype)


def _precision(named: Any, allow_tf32: Any) -> str:
    if named is None:
        return "ieee" if allow_tf32 is False else "tf32"
    return str(named)


def sum(input: Tensor, axis: Any = None, keep_dims: bool = False, dtype: Any = None) -> Tensor:
    """Small integers are summed as int32 and bfloat16 as float32, as Triton does."""
    kind = constant(dtype)
    if kind is None:
        kind = input.dtype
        if kind.is_int() and kind.int_bitwidth < 32:
            kind = tl.int32 if kind.is_int_signed() else tl.uint32
    return _reduced(
        np.add,
        cast(_wide(input) if dtype is None else input, kind if kind is not tl.bfloat16 else tl.float32),
        axis,
        keep_dims,
    )


def max(
    input: Tensor,
    axis: Any = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> Any:
    if return_indices:
        return _reduced(np.fmax, _wide(input), axis, keep_dims), argmax(input, axis, keep_dims=keep_dims)
    return _reduced(np.fmax, _wide(input), axis, keep_dims)


def min(
    input: Tensor,
    axis: Any = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> Any:
    if return_indices:
        return _reduced(np.fmin, _wide(input), axis, keep_dims), argmin(input, axis, keep_dims=keep_dims)
    return _reduced(np.fmin, _wide(input), axis, keep_dims)


def argmax(input: Tensor, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> Tensor:
    return Tensor(np.argmax(input.data, _axis(axis), keepdims=keep_dims).astype(np.int32), tl.int32)


def argmin(input: Tensor, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> Tensor:
    return Tensor(np.argmin(input.data, _axis(axis), keepdims=keep_dims).astype(np.int32), tl.int32)


def xor_sum(input: Tensor, axis: Any = None, keep_dims: bool = False) -> Tensor:
    return _reduced(np.bitwise_xor, input, axis, keep_dims)


def reduce_or(input: Tensor, axis: Any, keep_dims: bool = False) -> Tensor:
    return _reduced(np.bitwise_or, input, axis, keep_dims)


def _reduced(function: Any, input: Tensor, axis: Any, keep_dims: Any) -> Tensor:
    axis = _axis(axis)
    data = function.reduce(input.data, axis=axis, keepdims=bool(constant(keep_dims)))
    return Tensor(rounded(data, input.dtype), input.dtype)


def _axis(axis: Any) -> int | None:
    return None if axis is None else plain(axis)


def cumsum(input: Tensor, axis: Any = 0, reverse: Any = False, dtype: Any = None) -> Tensor:
    x = _wide(input) if dtype is None else cast(input, dtype)
    return _scanned(np.add, x, axis, reverse)


def cumprod(input: Tensor, axis: Any = 0, reverse: Any = False) -> Tensor:
    return _scanned(np.multiply, _wide(input), axis, reverse)


def _scanned(function: Any, input: Tensor, axis: Any, reverse: Any) -> Tensor:
    axis, data = plain(axis), input.data
    if constant(reverse):
        return Tensor(np.flip(function.accumulate(np.flip(data, axis), axis, data.dtype), axis), input.dtype)
    return Tensor(function.accumulate(data, axis, data.dtype), input.dtype)


def reduce(input: Any, axis: Any, combine_fn: Callable[..., Any], keep_dims: Any = False) -> Any:
    """The elements along an axis, combined from left to right; of several tensors at once where a tuple is given."""
    several = isinstance(input, tuple)
    tensors = input if several else (input,)
    if axis is None:
        tensors, axis = tuple(t._like(t.data.reshape(-1)) for t in tensors), 0
    axis = plain(axis)
    slices = [tuple(t._like(np.take(t.data, i, axis)) for t in tensors) for i in range(tensors[0].shape[axis])]
    total = slices[0]
    for item in slices[1:]:
        combined = combine_fn(*total, *item)
        total = combined if several else (combined,)
    if constant(keep_dims):
        total = tuple(t._like(np.expand_dims(t.data, axis)) for t in total)
    return total if several else total[0]


def associative_scan(input: Any, axis: Any, combine_fn: Callable[..., Any], reverse: Any = False) -> Any:
    """Like `reduce`, with every total on the way."""
    several = isinstance(input, tuple)
    tensors = input if several else (input,)
    axis = plain(axis)
    order = list(range(tensors[0].shape[axis]))
    if constant(reverse):
        order.reverse()
    totals: dict[int, Any] = {}
    total: Any = None
    for i in order:
        item = tuple(t._like(np.take(t.data, i, axis)) for t in tensors)
        if total is None:
            total = item
        else:
            combined = combine_fn(*total, *item)
            total = combined if several else (combined,)
        totals[i] = total
    stacked = [np.stack([totals[i][n].data for i in sorted(totals)], axis) for n in range(len(tensors))]
    result = tuple(t._like(data) for t, data in zip(totals[0], stacked, strict=True))
    return result if several else result[0]
