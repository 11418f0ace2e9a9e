# SPDX-License-Identifier: Apache-2.0
"""The online softmax of a consumer on Hopper: from the product of a tile to its weights, maxima and sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.scores import bent, biased, lost_by_distance
from ..kernels.tokens import visible
from .dropout import kept
from .plans import CONSUMER_ROWS
from .workarounds import hidden_unless_equal


@gluon.jit
def score_tile(s, tops, rows, keys, bias, away, F: gl.constexpr, MASKED: gl.constexpr, PLAN: gl.constexpr):
    """Four results: scores, what each row subtracts from them, the new `tops`, and factors for each row's sums so far.

    The second and the third are in units of log2. `tops[0]` has the row maxima. Each is updated only if a score exceeds
    it by more than 8 such units: any number near the maximum gives the same results, and without an update the sums
    need no multiplication. If scores are `PLAN.bounded`, half of the soft cap replaces all maxima, and the factors have
    no meaning. If `F.max_logits`, `tops[1]` has the exact maxima, for the result of that name. `rows` is a
    `forward_kernel.Rows`.
    """
    top = tops[0]
    RAGGED: gl.constexpr = MASKED and F.kv_length % PLAN.kv_tile != 0
    FOLD: gl.constexpr = fold_of(F)
    ONE_SIDED: gl.constexpr = PLAN.one_sided and not MASKED
    s = bent(s, F)
    if not (F.plain or folded(F)):
        s = s * F.unbend
    if F.bias:
        s = biased(s, bias)
    offset = top
    if F.distances:
        lost = lost_by_distance(rows.head, F, folded(F))
        if ONE_SIDED:
            # All keys come before the query, so the penalty is `lost * from_origin - lost * away`. The first term, the
            # same for a whole row, is left to `base`.
            s = s + lost * away
            offset = rows.from_origin * lost * FOLD
        else:
            s = s - lost * gl.abs(rows.from_origin[:, None] - away)
    if MASKED:
        s = _masked(s, rows, keys, F, RAGGED)
    most = gl.max(s, 1) * FOLD
    if ONE_SIDED:
        most = most - offset
    if F.max_logits:
        largest = gl.maximum(tops[1], most)
    now = top
    base = top
    shrink = top
    if not PLAN.bounded:
        now = gl.maximum(top, most)
        now = gl.where(now > top + 8.0, now, top)
        base = now
        if MASKED or F.bias:
            base = gl.where(now == -float("inf"), 0.0, now)
        shrink = gl.exp2(top - base)
        if ONE_SIDED:
            base = base + offset
    if F.max_logits:
        return s, base, (now, largest), shrink
    else:
        return s, base, (now,), shrink


@gluon.jit
def _masked(s, rows, keys, F: gl.constexpr, RAGGED: gl.constexpr):
    """Replaces the scores of hidden keys by -inf; `RAGGED`: the tile may reach past the last key."""
    OTHERS: gl.constexpr = F.without_segments
    s = gl.where(visible(rows.queries, keys, rows.head, OTHERS, RAGGED, False), s, -float("inf"))
    if F.segments:
        s = hidden_unless_equal(s, rows.queries.segment, keys.segment)
    return s


@gluon.jit
def weigh_tile(s, base, shrink, total, drawn, F: gl.constexpr, PLAN: gl.constexpr):
    """The softmax weights of a tile after dropout, and each row's updated sum of weights before dropout.

    The sums, `total`, are in four parts (`quad_sums`).
    """
    FOLD: gl.constexpr = fold_of(F)
    p = gl.exp2(s * FOLD - base[:, None])
    if not PLAN.bounded:
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, quad_layout(4)))[:, None]
    total = total + quad_sums(p)
    if F.dropout:
        p = gl.where(kept(drawn[0], drawn[1], F, PLAN.kv_tile), p, 0.0)
    return p, total


@gluon.constexpr_function
def folded(F):
    """Whether the ALiBi penalty is divided by `F.unbend`, instead of the scores multiplied by it."""
    return F.distances and not F.bias and F.unbend > 0


@gluon.constexpr_function
def fold_of(F):
    """The factor that converts the scores of `score_tile` to units of log2."""
    return F.unbend * F.fold if folded(F) else F.fold


@gluon.jit
def quad_sums(p):
    """Sums each row of `p` in four parts, `[64, 4]`: one for each of the four threads that hold the row."""
    own = gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(own, quad_layout(4))


@gluon.jit
def as_quads(total):
    """Turns each row's sum into four parts, as `quad_sums` returns them: the first is the sum, the others 0."""
    first = gl.arange(0, 4, gl.SliceLayout(0, quad_layout(4)))[None, :] == 0
    return gl.where(first, gl.convert_layout(total, gl.SliceLayout(1, quad_layout(4)))[:, None], 0.0)


@gluon.jit
def pack(p, TYPE: gl.constexpr):
    """Rounds the weights `p` to `TYPE` and packs two neighbours of a row in one 32-bit word: `[64, KV_TILE / 2]`.

    Carried from step to step as single numbers, the weights would cost an instruction each to unpack and pack them
    again.
    """
    first, second = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == TYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    words = gl.inline_asm_elementwise(ROUND, "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1)
    return gl.convert_layout(words, quad_layout(p.shape[1] // 2))


@gluon.constexpr_function
def quad_layout(COLUMNS):
    """The register layout of an array `[64, COLUMNS]`: each of the four threads of a row has every fourth column.

    Packed weights have this layout, and so do partial sums of rows, with four columns.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], *([0, 1 << bit] for bit in range(2, COLUMNS.bit_length() - 1))],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[CONSUMER_ROWS.value, COLUMNS],
    )


@gluon.jit
def unpack(weights, TYPE: gl.constexpr):
    """Unpacks `pack` weights to `TYPE`."""
    first = weights.to(gl.int16).to(TYPE, bitcast=True)
    second = (weights >> 16).to(gl.int16).to(TYPE, bitcast=True)
    return gl.reshape(gl.join(first, second), [weights.shape[0], weights.shape[1] * 2])
