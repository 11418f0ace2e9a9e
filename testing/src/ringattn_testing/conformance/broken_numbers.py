# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportGeneralTypeIssues=false
"""Kernels whose scores, sums or derivatives are wrong, for some options, sizes or dtypes only."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from ringattn_conformance.cases import DTYPES
from ringattn_conformance.oracle import per_pair

from ringattn_testing.conformance.breaks import (
    Break,
    Condition,
    always,
    bfloat16,
    changed,
    dtype,
    float16,
    half,
    has,
    wrong_in,
)
from ringattn_testing.conformance.numpy_ring import Block, Dense, coordinates, finite, log_sum_exp, summed_to

LARGEST_FLOAT16: Final = 65504.0


def signed(block: Block) -> np.ndarray:
    i, j = coordinates(block)
    return (i - j).astype(np.float64)


def by_index(block: Block) -> np.ndarray:
    return np.abs(block.q_index[:, None] - block.kv_index[None]).astype(np.float64)[None, None]


def of_distance(wrong: Callable[[Block, Any], Any], when: Condition = always) -> Dense:
    return wrong_in("distance", lambda right, block: wrong(block, right(block)) if when(block) else right(block))


def of_slopes(wrong: Callable[[Block, Any], Any]) -> Dense:
    return wrong_in("of_slopes", lambda right, block, ds: wrong(block, ds))


def of_bias(wrong: Callable[[Block, Any], Any], when: Condition = always) -> Dense:
    return wrong_in("of_bias", lambda right, block, ds: wrong(block, ds) if when(block) else right(block, ds))


def of_keep(wrong: Callable[[Block, bool, Any], Any], when: Condition = always) -> Dense:
    """A kernel whose factors of dropout are `wrong(block, backward, right)`."""

    def keep(right: Any, block: Block, backward: bool) -> Any:
        found = right(block, backward)
        return wrong(block, backward, found) if block.kept is not None and when(block) else found

    return wrong_in("keep", keep)


def of_kept(change: Callable[[Any, Block], Any], when: Condition = always, **passes: Any) -> Dense:
    return changed(has("kept", and_also=when), kept=lambda block: change(block.kept, block), **passes)


def of_bias_values(change: Callable[[Any], Any], when: Condition = always) -> Dense:
    return changed(has("bias", and_also=when), bias=lambda block: np.broadcast_to(change(block.bias), block.bias.shape))


def of_results(wrong: Callable[[Block, Any, Any], Any], when: Condition = always) -> Dense:
    """A kernel whose forward pass returns `wrong(block, out, lse)`."""

    def forward(right: Any, block: Block, partial: Any) -> Any:
        found = right(block, partial)
        return wrong(block, *found) if when(block) else found

    return wrong_in("forward", forward)


def of_gradients(name: str, wrong: Callable[[Block, Any], Any], when: Condition = always) -> Dense:
    """A kernel with one wrong gradient."""

    def backward(right: Any, block: Block, *arrays: Any) -> Any:
        found = right(block, *arrays)
        return found | {name: wrong(block, found[name])} if when(block) else found

    return wrong_in("backward", backward)


def empty(block: Block, out: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """The rows that see no key yet, as the output has them."""
    return np.isneginf(np.swapaxes(lse, 1, 2))[..., None]


def last(block: Block) -> bool:
    return block.hop == block.placement.ring - 1


def cut(x: np.ndarray, size: int) -> np.ndarray:
    """`x` with zeros after this many entries of its last axis."""
    return np.where(np.arange(x.shape[-1]) < size, x, 0)


def kernel_of_scores(wrong: Callable[[Block, Any, Any], Any]) -> Dense:
    return wrong_in("scores", lambda right, block, backward=False: wrong(block, *right(block, backward)))


def cap_elsewhere(before_scale: bool) -> Dense:
    """A kernel that caps scores before the scale, or after the bias."""

    def scores(right: Any, block: Block, backward: bool = False) -> Any:
        s, slope = right(block, backward)
        if block.soft_cap is None:
            return s, slope
        raw = per_pair(block.q, np.repeat(block.k, block.group, 2)) * (1 if before_scale else block.scale)
        bias = 0.0 if block.bias is None else block.bias
        rest = 0.0 if block.slopes is None else block.slopes[:, None, None] * Dense().distance(block)
        bent = np.tanh((raw if before_scale else raw + finite(bias)) / block.soft_cap)
        capped = block.soft_cap * bent * (block.scale if before_scale else 1)
        return np.where(np.isneginf(s), s, capped + (bias if before_scale else 0.0) - rest), 1 - bent**2

    return wrong_in("scores", scores)


def overflowing(block: Block, s: Any, slope: Any) -> Any:
    raw = per_pair(block.q, np.repeat(block.k, block.group, 2))
    beyond = float16(block) & (np.abs(raw) > LARGEST_FLOAT16) & ~np.isneginf(s)
    return np.where(beyond, np.inf, s), slope


def overflowing_values(right: Any, block: Block, partial: Any) -> Any:
    out, lse = right(block, partial)
    s, _ = Dense().scores(block)
    weights = np.exp(s - finite(s.max(-1, keepdims=True)))
    total = np.moveaxis(weights @ np.moveaxis(block.v.repeat(block.group, 2), 1, 2), 1, 2)
    return np.where(float16(block) & (np.abs(total) > LARGEST_FLOAT16), np.inf, out), lse


def without_maximum(right: Any, block: Block, s: np.ndarray) -> np.ndarray:
    found = right(block, s)
    return np.where(np.isinf(np.exp(s.max(-1, initial=-np.inf).astype(np.float32))), np.nan, found)


def less_the_cap(right: Any, block: Block, s: np.ndarray) -> np.ndarray:
    """The lse of a kernel that subtracts the soft cap from all scores; float32 weights below its normal range are 0."""
    if block.soft_cap is None or block.bias is not None or block.slopes is not None:
        return right(block, s)
    weights = np.exp(np.float32(s - block.soft_cap))
    total = np.where(weights < np.finfo(np.float32).tiny, 0.0, weights).sum(-1, dtype=np.float64)
    return block.soft_cap + np.log(total, where=total > 0, out=np.full(total.shape, -np.inf))


def key_heads(block: Block) -> np.ndarray:
    """The key head of each query head."""
    return np.arange(block.q.shape[2]) // block.group


def in_float16(block: Block, distance: np.ndarray) -> np.ndarray:
    return distance.astype(np.float16).astype(float)


def maximum_of_the_tile(right: Any, block: Block, s: np.ndarray) -> np.ndarray:
    """The lse of a kernel that subtracts one maximum from all rows: weights of rows far below it are zero."""
    top = finite(s.max(-1))
    return np.where(top.max(-1, keepdims=True) - top > 100, -np.inf, right(block, s))


def of_16_bits(block: Block, distance: np.ndarray) -> np.ndarray:
    return np.abs(signed(block).astype(np.int16)).astype(float)


SCORES: Final = {
    "`softmax_scale` is ignored": Break(changed(scale=lambda block: block.q.shape[-1] ** -0.5)),
    "The backward pass ignores `softmax_scale`": Break(
        changed(passes=("backward",), scale=lambda block: block.q.shape[-1] ** -0.5),
    ),
    "A negative scale is taken for a positive one": Break(changed(scale=lambda block: abs(block.scale))),
    "A scale above 1 is taken for 1": Break(changed(scale=lambda block: min(block.scale, 1.0))),
    "A scale of 0 is taken for the default": Break(
        changed(scale=lambda block: block.scale or block.q.shape[-1] ** -0.5)
    ),
    "The default scale is that of the next power of two": Break(
        changed(
            lambda block: block.case.scale is None,
            scale=lambda block: 2.0 ** (-np.ceil(np.log2(block.q.shape[-1])) / 2),
        ),
    ),
    "The soft cap is applied before the scale": Break(cap_elsewhere(True)),
    "The soft cap is applied after the bias": Break(cap_elsewhere(False)),
    "The derivative of the soft cap is 1": Break(kernel_of_scores(lambda block, s, slope: (s, 1.0))),
    "With a bias in half precision the soft cap is ignored": Break(
        changed(has("bias", and_also=half), soft_cap=lambda block: None),
    ),
    "All rows of the batch have the bias of the first": Break(of_bias_values(lambda bias: bias[:1])),
    "All heads have the bias of the first": Break(of_bias_values(lambda bias: bias[:, :1])),
    "In half precision a bias that all heads share is ignored": Break(
        of_bias_values(lambda bias: 0 * finite(bias), lambda block: half(block) and block.bias.shape[1] == 1),
    ),
    "In half precision a bias that all queries share is ignored": Break(
        of_bias_values(lambda bias: 0 * finite(bias), lambda block: half(block) and block.bias.shape[2] == 1),
    ),
    "From three rows on, a bias that the batch shares is ignored": Break(
        of_bias_values(lambda bias: 0 * finite(bias), lambda block: block.bias.shape[0] == 1 and len(block.q) > 2),
    ),
    "In half precision a bias with all axes is read for the rows of the batch in reverse order": Break(
        of_bias_values(lambda bias: bias[::-1], lambda block: half(block) and block.bias.shape[1] > 1),
    ),
    "A bias of bfloat16 beside queries of float16 is ignored": Break(
        of_bias_values(
            lambda bias: 0 * finite(bias), lambda block: float16(block) and block.case.bias_dtype == "bfloat16"
        ),
    ),
    "A bias of float32 beside queries in half precision is ignored": Break(
        of_bias_values(lambda bias: 0 * finite(bias), lambda block: half(block) and block.case.bias_dtype == "float32"),
    ),
    "In half precision a bias of -inf is taken for 0": Break(of_bias_values(finite, half)),
    "The bias is multiplied by the scale": Break(changed(has("bias"), bias=lambda block: block.bias * block.scale)),
    "ALiBi counts keys after the query negatively": Break(of_distance(lambda block, right: signed(block))),
    "ALiBi in half precision counts indices where positions are given": Break(
        of_distance(lambda block, right: by_index(block), half),
    ),
    "ALiBi counts no distance beyond 128": Break(of_distance(lambda block, right: np.minimum(right, 128))),
    "ALiBi counts distances in float16": Break(
        of_distance(in_float16),
        rarer=(("float16", of_distance(in_float16, float16)),),
    ),
    "ALiBi counts distances in 16 bits": Break(
        of_distance(of_16_bits),
        rarer=tuple((name, of_distance(of_16_bits, dtype(name))) for name in ("float32", "bfloat16")),
    ),
    "A negative slope is taken for a positive one": Break(
        changed(has("slopes"), slopes=lambda block: np.abs(block.slopes))
    ),
    "The heads of a group have one slope": Break(
        changed(has("slopes"), slopes=lambda block: block.slopes[key_heads(block) * block.group]),
    ),
    "With dropout and grouped heads in bfloat16 ALiBi is ignored": Break(
        changed(
            has("slopes", "kept", and_also=lambda block: bfloat16(block) and block.group > 1),
            slopes=lambda block: 0 * block.slopes,
        ),
    ),
    "Products of float16 are summed in float16, before the scale": Break(kernel_of_scores(overflowing)),
    "The number that is subtracted from the scores is the same for all rows": Break(
        wrong_in("lse", maximum_of_the_tile)
    ),
    "No maximum is subtracted from the scores": Break(wrong_in("lse", without_maximum)),
    "Without bias and ALiBi the soft cap is subtracted from the scores, in place of their maximum": Break(
        wrong_in("lse", less_the_cap),
        rarer=(("bfloat16", wrong_in("lse", less_the_cap)),),
    ),
}
DROPOUT: Final = {
    "What dropout keeps is not divided by the probability to keep it": Break(
        of_keep(lambda block, backward, right: right > 0)
    ),
    "The backward pass does not divide what dropout keeps by the probability to keep it": Break(
        of_keep(lambda block, backward, right: right > 0 if backward else right),
    ),
    "In float16 the backward pass drops nothing": Break(
        of_keep(lambda block, backward, right: 1.0 if backward else right, float16),
    ),
    "All heads drop what the first drops": Break(of_kept(lambda kept, block: np.broadcast_to(kept[:, :1], kept.shape))),
    "The heads of a group drop the same": Break(of_kept(lambda kept, block: kept[:, key_heads(block) * block.group])),
    "All rows of the batch drop what the first drops": Break(
        of_kept(lambda kept, block: np.broadcast_to(kept[:1], kept.shape))
    ),
    "From the second rank on, dropout draws other bits": Break(
        of_kept(lambda kept, block: kept[:, :, ::-1], lambda block: block.rank > 0)
    ),
    "From the second hop on, the backward pass draws other bits": Break(
        of_kept(lambda kept, block: kept[:, :, ::-1], lambda block: block.hop > 0, passes=("backward",)),
    ),
    "Dropped keys are left out of the softmax": Break(
        wrong_in(
            "lse",
            lambda right, block, s: (
                right(block, s) if block.kept is None else log_sum_exp(np.where(block.kept, s, -np.inf), -1)
            ),
        ),
    ),
    "With a window in bfloat16 the backward pass drops nothing": Break(
        of_keep(lambda block, backward, right: 1.0 if backward else right, has("window", and_also=bfloat16)),
    ),
}
RESULTS: Final = {
    "In half precision the lse is a logarithm to base 2": Break(
        of_results(lambda block, out, lse: (out, lse / np.log(2)), lambda block: half(block) and last(block))
    ),
    "On one rank the lse is rounded to the dtype of the queries": Break(
        of_results(
            lambda block, out, lse: (out, lse.astype(DTYPES[block.case.dtype]).astype(float)),
            lambda block: half(block) and block.placement.ring == 1,
        ),
    ),
    "In float16 the sum of weighted values is rounded before it is divided by the sum of the weights": Break(
        wrong_in("forward", overflowing_values),
    ),
    "A row that sees no key is the mean of all values": Break(
        of_results(
            lambda block, out, lse: (
                np.where(empty(block, out, lse), block.v.repeat(block.group, 2).mean(1, keepdims=True), out),
                lse,
            )
        ),
    ),
    "The lse of a row that sees no key is -1e30": Break(
        of_results(lambda block, out, lse: (out, np.maximum(lse, -1e30)))
    ),
    "From the third hop on, `partial` is ignored": Break(
        wrong_in("forward", lambda right, block, partial: right(block, None if block.hop > 1 else partial)),
    ),
    "In float16 `partial` is ignored": Break(
        wrong_in("forward", lambda right, block, partial: right(block, None if float16(block) else partial)),
    ),
    "Partial outputs are added as they are": Break(
        wrong_in("merged", lambda right, block, one, other: (one[0] + other[0], right(block, one, other)[1])),
    ),
    "With dropout in half precision `delta` is ignored": Break(
        wrong_in(
            "backward",
            lambda right, block, dout, lse, delta, dq: right(
                block, dout, lse, 0 * delta if half(block) and block.kept is not None else delta, dq
            ),
        ),
    ),
    "In half precision `dq` is not continued": Break(
        wrong_in("continued", lambda right, block, dq, own: own if half(block) else dq + own),
    ),
    "With `fused_backward`, heads above 128 and bfloat16 `dq` is not continued": Break(
        wrong_in(
            "continued",
            lambda right, block, dq, own: (
                own if block.case.fused_backward and bfloat16(block) and block.q.shape[-1] > 128 else dq + own
            ),
        ),
    ),
    "`dk` of a key head is the mean over its query heads; `dv` is right": Break(
        of_gradients("dk", lambda block, dk: dk / block.group),
    ),
    "`dv` of a key head with eight query heads is halved": Break(
        of_gradients("dv", lambda block, dv: dv / 2, lambda block: block.group == 8)
    ),
    "The derivatives of the scores are rounded to float16 before they are multiplied by the scale": Break(
        wrong_in("derivatives", lambda right, block, ds: ds.astype(np.float16).astype(float) if float16(block) else ds),
    ),
    "The gradient of a bias that all heads share is the mean over the heads": Break(
        of_bias(lambda block, ds: summed_to(ds, block.bias.shape) / (ds.shape[1] if block.bias.shape[1] == 1 else 1)),
    ),
    "The gradient of a bias that the batch shares is that of its first row": Break(
        of_bias(lambda block, ds: summed_to(ds[:1] if block.bias.shape[0] == 1 else ds, block.bias.shape)),
    ),
    "In half precision the gradient of a bias that all queries share is that of the first 16": Break(
        of_bias(lambda block, ds: summed_to(ds[:, :, :16] if block.bias.shape[2] == 1 else ds, block.bias.shape), half),
    ),
    "The gradient of the bias is multiplied by the scale": Break(
        of_bias(lambda block, ds: summed_to(ds, block.bias.shape) * block.scale)
    ),
    "The gradient of ALiBi counts keys after the query negatively": Break(
        of_slopes(lambda block, ds: -np.sum(ds * signed(block), (0, 2, 3)))
    ),
    "The gradient of ALiBi is that of the first row of the batch": Break(
        of_slopes(lambda block, ds: -np.sum((ds * Dense().distance(block))[:1], (0, 2, 3))),
    ),
}
