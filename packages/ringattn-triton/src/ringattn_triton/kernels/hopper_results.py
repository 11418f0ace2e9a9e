# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
"""What a consumer of a program on Hopper begins a turn with, and how it writes what comes of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..hopper import CONSUMED
from .hopper_pipeline import got, of_turn
from .scores import LOG2_E


@gluon.jit
def continues(LSE_BEFORE, start, batch, head, F: gl.constexpr, S: gl.constexpr, OF_ROWS: gl.constexpr):
    """Maxima and totals as other keys have left them, or before there was any key."""
    FRESH: gl.constexpr = S[5]
    BOUNDED: gl.constexpr = S[7]
    LEAST: gl.constexpr = F.fold / 2 if BOUNDED else -float("inf")
    least = gl.full([CONSUMED], LEAST, gl.float32, OF_ROWS)
    if FRESH:
        return least, gl.zeros([CONSUMED], gl.float32, OF_ROWS)
    else:
        rows = start + gl.arange(0, CONSUMED, OF_ROWS)
        at = (batch * F.heads + head).to(gl.int64) * F.q_length + rows
        before = gl.load(LSE_BEFORE + at, mask=rows < F.q_length, other=-float("inf"))
        if BOUNDED:
            return least, gl.exp2(before * LOG2_E - least)
        else:
            return before * LOG2_E, gl.where(before == -float("inf"), 0.0, 1.0)


@gluon.jit
def written(
    acc, top, total, bad, shared, number, NUMBER: gl.constexpr, OUT, LSE, REST, F: gl.constexpr,
    V: gl.constexpr, S: gl.constexpr, SUMS: gl.constexpr, OF_ROWS: gl.constexpr,
):  # fmt: skip
    """Writes the results of a turn, the `number`th of this program.

    Which turn that is, is read once more, so that nothing of it is held in registers meanwhile.
    """
    place = number % 2
    turn = got(shared.turns.index(place))
    mbarrier.arrive(shared.turns_empty.index(place), count=1)
    own, batch, head = of_turn(turn, F, V)
    start = own * (S[0] * CONSUMED) + NUMBER * CONSUMED
    rows = start + gl.arange(0, CONSUMED, OF_ROWS)
    nothing = total == 0.0
    divisor = gl.where(nothing, 1.0, total)
    inverse = gl.where(nothing, 0.0, 1.0 / divisor)
    lse = gl.where(nothing, -float("inf"), (top + gl.log2(divisor)) / LOG2_E)
    if F.bias:
        lost = (bad != 0) & (total != 0.0)
        inverse = gl.where(lost, float("nan"), inverse)
        lse = gl.where(lost, float("nan"), lse)
    exact = acc * gl.convert_layout(inverse, gl.SliceLayout(1, SUMS))[:, None]
    out = exact.to(OUT.dtype.element_ty)
    # A product leaves two neighbours in a thread, four bytes of half precision. A bias leaves no room to trade.
    SMALL: gl.constexpr = OUT.dtype.element_ty.primitive_bitwidth == 16
    TRADED: gl.constexpr = SMALL and F.head_dim == 128 and not F.bias
    WRITTEN: gl.constexpr = in_sixteens() if TRADED else SUMS
    out_at, within = outputs(start, batch, head, F, WRITTEN)
    gl.store(OUT + out_at, gl.convert_layout(out, WRITTEN), mask=within)
    SPLIT: gl.constexpr = S[8]
    if SPLIT:
        rest = (exact - out.to(gl.float32)).to(out.dtype)
        gl.store(REST + out_at, gl.convert_layout(rest, WRITTEN), mask=within)
    lse_at = (batch * F.heads + head).to(gl.int64) * F.q_length + rows
    gl.store(LSE + lse_at, lse, mask=rows < F.q_length)


@gluon.constexpr_function
def in_sixteens():
    """64 rows of 128 numbers of two bytes in the threads of a warpgroup: as a product leaves them, but that four
    threads have traded, so that each has sixteen bytes of a row in one piece.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[CONSUMED.value, 128],
    )


@gluon.jit
def outputs(start, batch, head, F: gl.constexpr, SUMS: gl.constexpr):
    """Where the outputs of 64 queries lie, and which of them there are."""
    rows = start + gl.arange(0, CONSUMED, gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, F.value_dim, gl.SliceLayout(0, SUMS))
    at = (batch.to(gl.int64) * F.q_length + rows)[:, None] * (F.heads * F.value_dim)
    return at + head * F.value_dim + dims[None, :], (rows < F.q_length)[:, None]
