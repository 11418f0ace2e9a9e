# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""The scores of a tile, and in the backward pass its probabilities and the gradients of its scores."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from ringattn_core.contract import protocol

from .. import kernel_inputs
from .tokens import as_queries, long_rows, visible

LOG2_E: tl.constexpr = tl.constexpr(kernel_inputs.LOG2_E)
BIAS_FORBIDS: tl.constexpr = tl.constexpr(protocol.BIAS_FORBIDS)


class Head(NamedTuple):
    """What a kernel needs of one query head of one batch row; a field is 0 where the call does not use its option.

    `number` is the head's number in the block. `bias` and `mask_words` point to its bias and packed mask, `slope` is
    its ALiBi slope, and `dropout_key` its Philox key.
    """

    number: Any
    bias: Any
    slope: Any
    mask_words: Any
    dropout_key: Any


@triton.jit
def of_head(P, batch, head, F: tl.constexpr):
    """Loads the `Head` of query head `head` in batch row `batch`."""
    bias = 0
    slope = 0.0
    mask_words = 0
    dropout_key = 0
    wide_batch = batch.to(tl.int64)
    wide_head = head.to(tl.int64)
    if F.bias:
        bias = P.bias + (wide_batch * F.bias_batch + wide_head * F.bias_head)
    if F.slopes:
        slope = tl.load(P.slopes + (batch * F.slopes_batch + head))
    if F.masks:
        mask = tl.load(P.mask_of_head + head).to(tl.int64) if F.mask_numbered else wide_head // F.mask_heads
        mask_words = P.mask_words + (wide_batch * F.mask_batch + mask * F.mask_head)
    if F.dropout:
        dropout_key = tl.load(P.dropout_keys + (batch * F.heads + head))
    return Head(head, bias, slope, mask_words, dropout_key)


@triton.jit
def bent(product, F: tl.constexpr):
    """`tanh(product * F.bend)` if the call has a soft cap, else `product` itself."""
    if F.capped:
        return tanh(product * F.bend, F)
    else:
        return product


@triton.jit
def biases(queries, keys, head, F: tl.constexpr):
    """Loads the bias of a tile; 0 if there is none. Called before the products, so that the load overlaps with them."""
    if F.bias:
        if F.bias_key == 1:
            return tl.load(head.bias + (long_rows(queries, F) * F.bias_query + keys.column))
        else:
            column = keys.column.to(tl.int64) if F.long_score_offsets else keys.column
            return tl.load(head.bias + (queries.row * F.bias_query + column * F.bias_key))
    else:
        return 0


@triton.jit
def scored(bent_product, bias, queries, keys, head, F: tl.constexpr):
    """The scores of a tile before masks, from `bent` and `biases`; they lack the factor `F.unbend` if `F.plain`."""
    s = bent_product
    if not F.plain:
        s = s * F.unbend
    if F.bias:
        s = biased(s, bias)
    if F.slopes:
        s = s - lost_by_distance(head, F, False) * distance(queries, keys)
    return s


@triton.jit
def biased(s, bias):
    """`s + bias` in float32, but -inf where the bias is below `BIAS_FORBIDS`."""
    bias = bias.to(tl.float32)
    return s + tl.where(bias < BIAS_FORBIDS, -float("inf"), bias)


@triton.jit
def lost_by_distance(head, F: tl.constexpr, OVER_UNBEND: tl.constexpr):
    """The ALiBi penalty per unit of distance; `OVER_UNBEND`: for scores that are not yet multiplied by `F.unbend`."""
    return head.slope / F.unbend if OVER_UNBEND else head.slope


@triton.jit
def with_per_head_gradient(sums, ds, queries, keys, F: tl.constexpr):
    """Adds to `sums` each query's part of the gradient of the ALiBi slope, `-ds * distance`, if there is a slope."""
    if F.slopes:
        sums -= tl.sum(ds * distance(queries, keys), 1)
    return sums


@triton.jit
def distance(queries, keys):
    """`|i - j|` in float32 for each pair of a tile, where `i` and `j` are the positions of the query and the key."""
    return tl.abs(queries.position - keys.position).to(tl.float32)


@triton.jit
def tanh(x, F: tl.constexpr):
    """The hyperbolic tangent, exact to the last bits of float32, or by a device instruction to 2^-11 if `F.fast`."""
    if F.fast:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        size = tl.abs(x)
        decay = tl.exp2(size * (-2.0 * LOG2_E))
        far = (1.0 - decay) / (1.0 + decay)
        # Near zero the difference in `far` loses digits; the Taylor series is exact to float32 there.
        square = x * x
        series = -17.0 / 315.0 + square * (62.0 / 2835.0)
        series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * series))
        return tl.where(size < 0.25, x * series, tl.where(x < 0.0, -far, far))


@triton.jit
def continued_rows(lse):
    """The row maxima and row sums with which the online softmax continues from a partial result with log-sum-exp `lse`.

    A maximum is `lse` in units of log2. The sum of weights relative to it is 1, 0 for a row that has seen nothing and
    has no sinks, or NaN where `lse` is NaN: the output is then NaN even if the row sees no key.
    """
    return lse * LOG2_E, tl.where(lse == -float("inf"), 0.0, tl.where(lse == lse, 1.0, lse))


@triton.jit
def final_rows(top, total, F: tl.constexpr):
    """A row's `lse` (natural logarithm) and the factor from its sum of weighted values to its output.

    `top` is the row maximum (units of log2), `total` the sum of weights. A row that sees nothing gets -inf and factor
    0.
    """
    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    factor = tl.where(nothing, 0.0, F.keep_weight / divisor)
    lse = (top + tl.log2(divisor)) / LOG2_E
    return tl.where(nothing, -float("inf"), lse), factor


@triton.jit
def backward_rows(LSE, DELTA, at, rows, F: tl.constexpr, RAGGED: tl.constexpr, BY_KEYS: tl.constexpr):
    """Loads `lse` (in units of log2) and `delta` of some queries. Past the last query lse is +inf, so that p is 0."""
    if RAGGED:
        lse = tl.load(LSE + at, mask=rows < F.q_length, other=float("inf"))
        delta = tl.load(DELTA + at, mask=rows < F.q_length, other=0.0)
    else:
        lse = tl.load(LSE + at)
        delta = tl.load(DELTA + at)
    return as_queries(lse, BY_KEYS), as_queries(delta, BY_KEYS)


@triton.jit
def derivatives(
    bent_product, dp, lse, delta, bias, keep, queries, keys, head, F: tl.constexpr, MASKED: tl.constexpr,
    KV_RAGGED: tl.constexpr,
):  # fmt: skip
    """Three results for a tile: probabilities after dropout, the gradient of the scores, and the gradient of `q k`.

    The last lacks the softmax scale (`narrowed`). `dp` is `dout v`, and `lse` is in units of log2. `bias` is from
    `biases` and `keep` from `dropout.weights`; neither is read if the call does not use the option.
    """
    s = scored(bent_product, bias, queries, keys, head, F)
    if MASKED:
        s = tl.where(visible(queries, keys, head, F, KV_RAGGED, True), s, -float("inf"))
    p = tl.exp2(s * F.fold - lse)
    dropped = p
    if F.dropout:
        dropped = p * keep
        dp = dp * keep
    ds = p * (dp - delta)
    dproduct = ds
    if F.capped:
        dproduct = ds * (1.0 - bent_product * bent_product)
    return dropped, ds, dproduct


@triton.jit
def as_operand(x, like, F: tl.constexpr):
    """Converts float32 `x` to the operand of a product with `like`: to its dtype, or to the nearest TF32 number.

    Ties go away from zero. `kernel_inputs.nearest_tf32` says why, and does this for the arrays that kernels read, where
    ties go to even. NaN is left as it is: adding to its bits may turn it into zero.
    """
    if F.precision == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(like.dtype)


@triton.jit
def narrowed(dproduct, like, F: tl.constexpr):
    """Converts `dproduct`, the gradient of `q k` without the softmax scale, by `as_operand`.

    For float16 the result is multiplied by the scale: without it, a gradient may exceed 65504, the largest float16.
    """
    if like.dtype == tl.float16:
        dproduct = dproduct * F.scale
    return as_operand(dproduct, like, F)


@triton.jit
def scaled(total, like, F: tl.constexpr):
    """Multiplies `total`, a sum over `narrowed` gradients, by the softmax scale. In float16 they already have it."""
    if like.dtype != tl.float16:
        total = total * F.scale
    return total
