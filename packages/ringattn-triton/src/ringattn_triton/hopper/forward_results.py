# SPDX-License-Identifier: Apache-2.0
"""How a consumer of a forward program on Hopper loads a partial result at the start of a turn and writes results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..kernels.scores import LOG2_E, continued_rows, final_rows
from .forward_transfers import read
from .hardware_barriers import arrive_at
from .head_tiles import dims_of, tile_offsets
from .layouts import CONSUMER_ROWS, product_layout, row_layout, store_layout
from .sums import accumulator, accumulators, as_column

MOST: gl.constexpr = gl.constexpr(2.0**99)
"""Above any sum of weights relative to half of the soft cap: a weight is at most 2^36.5 (half of the largest cap,
`forward._BOUND`), so those of 2^31 keys add up to less than 2^68."""


@gluon.jit
def no_maxima(TOP: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """The `tops` of `Scores` for rows that have seen no key: `TOP`, and -inf for the exact maxima if `F.max_logits`."""
    OF_ROWS: gl.constexpr = row_layout(PLAN.kv_tile)
    top = gl.full([CONSUMER_ROWS], TOP, gl.float32, OF_ROWS)
    return (top, gl.full([CONSUMER_ROWS], -float("inf"), gl.float32, OF_ROWS)) if F.max_logits else (top,)


@gluon.jit
def load_rows(BEFORE, start, batch, head, F: gl.constexpr, PLAN: gl.constexpr):
    """The `tops` of `Scores` and the row sums with which a turn begins: those of the partial result `BEFORE`.

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
            top, total = continued_rows(before)
        if F.max_logits:
            return (top, gl.load(BEFORE[2] + at, mask=rows < F.q_length, other=-float("inf")) * LOG2_E), total
        else:
            return (top,), total


@gluon.jit
def load_sums(OUT, start, batch, head, F: gl.constexpr):
    """Loads the partial outputs of 64 queries, from query `start` on, as accumulators (`sums`)."""
    sums = ()
    for number in gl.static_range(accumulators(F.value_dim)):
        at, within = _offsets(start, batch, head, number, product_layout(accumulator(F.value_dim, number)[1]), F)
        sums += (gl.load(OUT + at, mask=within, other=0.0),)
    return sums


@gluon.jit
def _offsets(start, batch, head, NUMBER: gl.constexpr, LAYOUT: gl.constexpr, F: gl.constexpr):
    """The `tile_offsets` of accumulator `NUMBER` of 64 queries' outputs."""
    FIRST: gl.constexpr = accumulator(F.value_dim, NUMBER)[0]
    WIDTH: gl.constexpr = accumulator(F.value_dim, NUMBER)[1]
    return tile_offsets(start, batch, head, F.q_length, F.heads, F.value_dim, FIRST, WIDTH, LAYOUT)


@gluon.jit
def write_results(acc, tops, total, shared, turn, CONSUMER: gl.constexpr, AFTER, F: gl.constexpr, PLAN: gl.constexpr):
    """Writes the results of consumer `CONSUMER` for turn number `turn` of this program to `AFTER`.

    If `PLAN.results_by_tma`, the outputs go where the turn's queries were in shared memory, and the producer writes
    them to global memory. The turn's numbers are read from shared memory again, to occupy no registers during the turn.
    """
    OUT = AFTER[0]
    OF_ROWS: gl.constexpr = row_layout(PLAN.kv_tile)
    total = gl.convert_layout(gl.sum(total, 1), OF_ROWS)
    start = read(shared, "first_query", turn % 2) + CONSUMER * CONSUMER_ROWS
    batch = read(shared, "batch", turn % 2)
    head = read(shared, "head", turn % 2)
    if not PLAN.results_by_tma:
        arrive_at("turn_done", turn % 2, PLAN)
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
    for number in gl.static_range(len(acc)):
        out = (acc[number] * as_column(factor, acc[number].shape[1])).to(OUT.dtype.element_ty)
        if PLAN.results_by_tma:
            own = shared.q[0].index(turn % 2 * PLAN.consumers + CONSUMER)
            dims_of((own,), accumulator(F.value_dim, number)[0], out.shape[1]).store(out)
        else:
            _store(out, start, batch, head, OUT, number, F)
    if PLAN.results_by_tma:
        fence_async_shared()
        arrive_at("turn_done", turn % 2, PLAN)


@gluon.jit
def _store(out, start, batch, head, OUT, NUMBER: gl.constexpr, F: gl.constexpr):
    """Writes accumulator `NUMBER` of the outputs from registers to global memory."""
    WIDTH: gl.constexpr = out.shape[1]
    HALF: gl.constexpr = OUT.dtype.element_ty.primitive_bitwidth == 16
    LAYOUT: gl.constexpr = store_layout(WIDTH) if HALF else product_layout(WIDTH)
    at, within = _offsets(start, batch, head, NUMBER, LAYOUT, F)
    gl.store(OUT + at, gl.convert_layout(out, LAYOUT), mask=within)
