# SPDX-License-Identifier: Apache-2.0
"""The online softmax of a consumer on Hopper: from the product of a tile to its weights, maxima and sums."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.scores import bent, biased, lost_by_distance
from ..kernels.tokens import visible
from .dropout import kept
from .layouts import quad_layout
from .sums import quad_sums
from .workarounds import hidden_unless_equal


class Scores(NamedTuple):
    """The scores of a tile, and the maxima of its rows. `base` and `tops` are in units of log2."""

    s: Any
    base: Any  # what each row subtracts from its scores
    tops: Any  # the new row maxima: the maxima that weights are relative to and, if `F.max_logits`, the exact maxima
    shrink: Any  # a factor for each row's sums so far; without meaning if `PLAN.bounded`


@gluon.jit
def score_tile(s, tops, own, keys, bias, key_offsets, F: gl.constexpr, MASKED: gl.constexpr, PLAN: gl.constexpr):
    """The `Scores` of a tile, from its products `s`. `own` is a `forward_kernel.OwnQueries`.

    A row's maximum in `tops[0]` is updated only if a score exceeds it by more than 8 units of log2: any number near
    the maximum gives the same results, and without an update the sums need no multiplication. If scores are
    `PLAN.bounded`, half of the soft cap replaces all maxima.
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
    penalty = top  # of a row, if `ONE_SIDED`
    if F.slopes:
        lost = lost_by_distance(own.head, F, folded(F))
        if ONE_SIDED:
            # All keys come before the query, so the penalty is `lost * own.offsets - lost * key_offsets`. The first
            # term, the same for a whole row, is left to `base`.
            s = s + lost * key_offsets
            penalty = own.offsets * lost * FOLD
        else:
            s = s - lost * gl.abs(own.offsets[:, None] - key_offsets)
    if MASKED:
        OTHERS: gl.constexpr = F.without_segments
        s = gl.where(visible(own.queries, keys, own.head, OTHERS, RAGGED, False), s, -float("inf"))
        if F.segments:
            s = hidden_unless_equal(s, own.queries.segment, keys.segment)
    most = gl.max(s, 1) * FOLD
    if ONE_SIDED:
        most = most - penalty
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
            base = base + penalty
    return Scores(s, base, (now, largest) if F.max_logits else (now,), shrink)


@gluon.jit
def weigh_tile(s, base, shrink, total, drawn, F: gl.constexpr, PLAN: gl.constexpr):
    """The softmax weights of a tile after dropout, and each row's updated sum of weights before dropout.

    The sums, `total`, are in four parts (`sums.quad_sums`).
    """
    p = gl.exp2(s * fold_of(F) - base[:, None])
    if not PLAN.bounded:
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, quad_layout(4)))[:, None]
    total = total + quad_sums(p)
    if F.dropout:
        p = gl.where(kept(drawn[0], drawn[1], F, PLAN.kv_tile), p, 0.0)
    return p, total


@gluon.constexpr_function
def folded(F):
    """Whether the ALiBi penalty is divided by `F.unbend`, instead of the scores multiplied by it."""
    return F.slopes and not F.bias and F.unbend > 0


@gluon.constexpr_function
def fold_of(F):
    """The factor that converts the scores of `score_tile` to units of log2."""
    return F.unbend * F.fold if folded(F) else F.fold
