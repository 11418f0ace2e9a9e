# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
"""The online softmax of a consumer on Hopper: from the product of a tile to its weights, maxima and sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.scores import LOG2_E, bent, in_log2
from ..kernels.tokens import visible
from .dropout import kept
from .schedules import CONSUMER_ROWS


@gluon.jit
def scored(s, top, queries, keys, bias, away, head, F: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr):
    """The scores of a tile, what to subtract from them, the updated row maxima, and the factor for the sums so far.

    A maximum is updated only if a score exceeds it by a factor of 2^8 in the weights: any number near the maximum gives
    the same results, and without an update the sums need no multiplication. If scores are `BOUNDED`, half of the bound
    replaces all maxima, and the factor, 1, is not used.
    """
    KV_TILE: gl.constexpr = S[1]
    BOUNDED: gl.constexpr = S[7]
    RAGGED: gl.constexpr = MASKED and F.kv_length % KV_TILE != 0
    FOLD: gl.constexpr = 1.0 if F.bias else F.fold
    if F.capped:
        s = bent(s, F)
    if not F.plain:
        s = s * F.unbend
    if F.bias:
        s = s + bias.to(gl.float32)
    if F.slopes:
        s = s - head.slope * gl.abs(away[0] - away[1])
    if MASKED:
        s = gl.where(visible(queries, keys, head, F, False, RAGGED, False), s, -float("inf"))
    if BOUNDED:
        return s, top, top, top
    else:
        now = gl.maximum(top, gl.max(s, 1) * FOLD)
        SLACK: gl.constexpr = 8.0 / LOG2_E if F.bias else 8.0
        now = gl.where(now > top + SLACK, now, top)
        base = now
        if MASKED or F.bias:
            base = gl.where(now == -float("inf"), 0.0, now)
        return s, base, now, gl.exp2(in_log2(top - base, F))


@gluon.jit
def weighed(s, base, shrink, total, drawn, F: gl.constexpr, S: gl.constexpr, SCORES: gl.constexpr):
    """The weights of a tile after dropout, and the updated sums of weights before it (`sums_of_parts`)."""
    if S[7]:
        p = gl.exp2(s * F.fold - base[:, None])
        total = total + sums_of_parts(p)
    else:
        FOLD: gl.constexpr = 1.0 if F.bias else F.fold
        p = gl.exp2(in_log2(s * FOLD - base[:, None], F))
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, parts_of_rows()))[:, None] + sums_of_parts(p)
    if F.dropout:
        p = gl.where(kept(drawn[0], drawn[1], F, S[1], SCORES), p, 0.0)
    return p, total


@gluon.constexpr_function
def parts_of_rows():
    """The layout of an array `[64, 4]` with an element in each of the four threads that share a row of a product."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[CONSUMER_ROWS.value, 4],
    )


@gluon.jit
def sums_of_parts(p):
    """The partial sums of a row, `[64, 4]`, one in each of the four threads that share it, without communication."""
    own = gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(own, parts_of_rows())


@gluon.jit
def in_parts(total):
    """Turns sums of rows into four partial sums as of `sums_of_parts`: the first is the sum, the others are 0."""
    first = gl.arange(0, 4, gl.SliceLayout(0, parts_of_rows()))[None, :] == 0
    return gl.where(first, gl.convert_layout(total, gl.SliceLayout(1, parts_of_rows()))[:, None], 0.0)


@gluon.jit
def sum_of_parts(total, OF_ROWS: gl.constexpr):
    """Adds the four partial sums of each row (`sums_of_parts`); `OF_ROWS` is the layout of the result, `[64]`."""
    return gl.convert_layout(gl.sum(total, 1), OF_ROWS)


@gluon.jit
def distances(queries, keys, origin, F: gl.constexpr):
    """How far the queries and the keys of a tile are from `origin`, for ALiBi, which takes the difference; or zeros.

    Whole numbers become float32 once for each row and column, not for each score; they are exact up to 2^24.
    """
    if F.slopes:
        return (queries.position - origin).to(gl.float32), (keys.position - origin).to(gl.float32)
    else:
        return 0, 0


@gluon.jit
def packed(p, TYPE: gl.constexpr):
    """Weights in half precision, two neighbours of a row in one word: `[64, KV_TILE / 2]`.

    Carried from step to step as single numbers, they cost the assembler an instruction each to unpack and pack again.
    """
    first, second = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == TYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ROUND, "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_operand(weights, TYPE: gl.constexpr, SUMS: gl.constexpr):
    """Packed weights in the layout of a product's left operand."""
    first = weights.to(gl.int16).to(TYPE, bitcast=True)
    second = (weights >> 16).to(gl.int16).to(TYPE, bitcast=True)
    p = gl.reshape(gl.join(first, second), [weights.shape[0], weights.shape[1] * 2])
    return gl.convert_layout(p, gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2))
