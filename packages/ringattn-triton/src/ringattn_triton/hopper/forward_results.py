# SPDX-License-Identifier: Apache-2.0
"""How a consumer of a forward program on Hopper loads a partial result at the start of a turn and writes results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..kernels.scores import LOG2_E, final_rows
from ..kernels.scores import continued_rows as continued
from .forward_transfers import read
from .hardware_barriers import arrive_at
from .head_tiles import dims_of, in_two_pieces, product_layout, row_layout
from .plans import CONSUMER_ROWS
from .sums import accumulators, as_column, first_of, width_of

MOST: gl.constexpr = gl.constexpr(2.0**99)
"""More than the weights of all keys of a row, relative to half of the soft cap, can add up to."""


@gluon.jit
def no_maxima(TOP: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """The `tops` of `forward_softmax.score_tile` for rows that have seen no key; all their maxima in `tops[0]` are
    `TOP`."""
    OF_ROWS: gl.constexpr = row_layout(PLAN.kv_tile)
    top = gl.full([CONSUMER_ROWS], TOP, gl.float32, OF_ROWS)
    if F.max_logits:
        return top, gl.full([CONSUMER_ROWS], -float("inf"), gl.float32, OF_ROWS)
    else:
        return (top,)


@gluon.jit
def continued_rows(BEFORE, start, batch, head, F: gl.constexpr, PLAN: gl.constexpr):
    """The `tops` of `forward_softmax.score_tile` and the row sums with which a turn begins: those of the partial result
    `BEFORE`.

    Unless `PLAN.from_lse`, they are those of rows that have seen no key. If `PLAN.bounded`, half of the soft cap
    replaces all maxima. Sinks may be so far from it that their weight relative to it is no float32: it becomes 0 or
    `MOST`. In a row with the weight 0 and no keys, or with `MOST`, `write_results` leaves the log-sum-exp as it was.
    """
    OF_ROWS: gl.constexpr = row_layout(PLAN.kv_tile)
    LEAST: gl.constexpr = F.fold / 2 if PLAN.bounded else -float("inf")
    tops = no_maxima(LEAST, F, PLAN)
    if not PLAN.from_lse:
        return tops, gl.zeros([CONSUMER_ROWS], gl.float32, OF_ROWS)
    else:
        rows = start + gl.arange(0, CONSUMER_ROWS, OF_ROWS)
        at = (batch * F.heads + head).to(gl.int64) * F.q_length + rows
        before = gl.load(BEFORE[1] + at, mask=rows < F.q_length, other=-float("inf"))
        if PLAN.bounded:
            top = tops[0]
            total = gl.exp2(before * LOG2_E - top)
            total = gl.where(total > MOST, MOST, total)  # a minimum would hide NaN
        else:
            top, total = continued(before)
        if F.max_logits:
            return (top, gl.load(BEFORE[2] + at, mask=rows < F.q_length, other=-float("inf")) * LOG2_E), total
        else:
            return (top,), total


@gluon.jit
def write_results(acc, tops, total, shared, number, NUMBER: gl.constexpr, AFTER, F: gl.constexpr, PLAN: gl.constexpr):
    """Writes the results of consumer `NUMBER` for turn `number` of this program to `AFTER`.

    If results are `PLAN.results_by_tma`, the outputs go where the turn's queries were in shared memory, and the
    producer writes them to global memory. The turn's numbers are read from shared memory again, to occupy no registers
    during the turn.
    """
    OUT = AFTER[0]
    OF_ROWS: gl.constexpr = row_layout(PLAN.kv_tile)
    total = gl.convert_layout(gl.sum(total, 1), OF_ROWS)  # of four parts (`forward_softmax.quad_sums`)
    start = read(shared, "first", number % 2) + NUMBER * CONSUMER_ROWS
    batch = read(shared, "batch", number % 2)
    head = read(shared, "head", number % 2)
    if not PLAN.results_by_tma:
        arrive_at("turn_empty", number % 2, PLAN)
    rows = start + gl.arange(0, CONSUMER_ROWS, OF_ROWS)
    lse_at = (batch * F.heads + head).to(gl.int64) * F.q_length + rows
    lse, factor = final_rows(tops[0], total, F)
    if PLAN.bounded and PLAN.from_lse:
        # The log-sum-exp of the partial result lies where the new one is written.
        unchanged = ((total == 0.0) | (total >= MOST)) & (rows < F.q_length)
        lse = gl.where(unchanged, gl.load(AFTER[1] + lse_at, mask=unchanged, other=0.0), lse)
    gl.store(AFTER[1] + lse_at, lse, mask=rows < F.q_length)
    if F.max_logits:
        gl.store(AFTER[2] + lse_at, tops[1] / LOG2_E, mask=rows < F.q_length)
    for piece in gl.static_range(len(acc)):
        out = (acc[piece] * as_column(factor, acc[piece].shape[1])).to(OUT.dtype.element_ty)
        if PLAN.results_by_tma:
            mine = shared.q[0].index(number % 2 * PLAN.consumers + NUMBER)
            dims_of((mine,), first_of(F.value_dim, piece), acc[piece].shape[1]).store(out)
        else:
            _write(out, start, batch, head, OUT, first_of(F.value_dim, piece), F)
    if PLAN.results_by_tma:
        fence_async_shared()
        arrive_at("turn_empty", number % 2, PLAN)


@gluon.jit
def _write(out, start, batch, head, OUT, FIRST: gl.constexpr, F: gl.constexpr):
    """Writes `out`, the piece of the outputs that begins at dimension `FIRST`, from registers to global memory."""
    # A product leaves two neighbouring numbers in a thread, four bytes of half precision; threads can exchange numbers
    # to have sixteen. A bias leaves no shared memory for the exchange, nor do values in two pieces.
    WIDTH: gl.constexpr = out.shape[1]
    SMALL: gl.constexpr = OUT.dtype.element_ty.primitive_bitwidth == 16
    EXCHANGED: gl.constexpr = SMALL and WIDTH > 64 and not F.bias and not in_two_pieces(F.value_dim)
    WRITTEN: gl.constexpr = store_layout(WIDTH) if EXCHANGED else product_layout(WIDTH)
    out_at, within = tile_offsets(start, batch, head, F.q_length, F.heads, F.value_dim, FIRST, WIDTH, WRITTEN)
    gl.store(OUT + out_at, gl.convert_layout(out, WRITTEN), mask=within)


@gluon.constexpr_function
def store_layout(DIM):
    """The register layout of `[64, DIM]` two-byte numbers in which a thread has sixteen contiguous bytes of a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]][: DIM.bit_length() - 2],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[CONSUMER_ROWS.value, DIM],
    )


@gluon.jit
def load_sums(OUT, start, batch, head, F: gl.constexpr):
    """Loads the partial outputs of 64 queries, from query `start` on, as accumulators (`sums`)."""
    sums = ()
    for piece in gl.static_range(accumulators(F.value_dim)):
        sums += (_load(OUT, start, batch, head, first_of(F.value_dim, piece), width_of(F.value_dim, piece), F),)
    return sums


@gluon.jit
def _load(OUT, start, batch, head, FIRST: gl.constexpr, WIDTH: gl.constexpr, F: gl.constexpr):
    out_at, within = tile_offsets(
        start, batch, head, F.q_length, F.heads, F.value_dim, FIRST, WIDTH, product_layout(WIDTH)
    )
    return gl.load(OUT + out_at, mask=within, other=0.0)


@gluon.jit
def tile_offsets(
    start, batch, head, LENGTH: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, FIRST: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The offsets of a `[64, WIDTH]` tile in an array `[B, LENGTH, HEADS, DIM]`.

    The tile is 64 tokens from `start` on and `WIDTH` dimensions from `FIRST` on, of one batch row and head. The second
    result says which offsets are inside the array.
    """
    rows = start + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, LAYOUT))
    dims = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = (batch.to(gl.int64) * LENGTH + rows)[:, None] * (HEADS * DIM)
    within = (rows < LENGTH)[:, None]
    if DIM < FIRST + WIDTH:
        within = within & (dims < DIM)[None, :]
    return at + head * DIM + dims[None, :], within
