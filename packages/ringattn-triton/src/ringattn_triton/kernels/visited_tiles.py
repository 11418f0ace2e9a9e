# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
"""The kernel that turns a bitmap of visible tiles into a table of the tiles that each row of the bitmap visits.

It also writes the table's ranks and zeroes its counters, because one launch is faster than three.
"""

import triton
import triton.language as tl


@triton.jit
def table(
    SEEN, BOUNDS, TILES, RANKS, COUNTERS,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, LISTED: tl.constexpr,
    RUN: tl.constexpr, TOGETHER: tl.constexpr, CHUNK: tl.constexpr, LINE_PROGRAMS: tl.constexpr,
    RANK_ROWS: tl.constexpr, RANK_COLUMNS: tl.constexpr, COUNT: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Writes the arrays of a `Table` (`ringattn_triton.visited_tiles`); `COUNTERS` gets `COUNT` zeros.

    The bitmap `SEEN [g, rows, columns]` is 0 for an invisible tile, 1 for a tile that needs a mask, and 2 for a tile
    that needs none. Each of the first `LINE_PROGRAMS` programs writes `BOUNDS` and `TILES` for `TOGETHER` rows. Each
    other program writes `RANKS` for `RANK_COLUMNS` columns. All programs write zeros, `ZEROS` at a time.
    """
    program = tl.program_id(0)
    for start in range(program * ZEROS, COUNT, tl.num_programs(0) * ZEROS):
        at = start + tl.arange(0, ZEROS)
        tl.store(COUNTERS + at, tl.zeros([ZEROS], tl.int32), mask=at < COUNT)
    if program < LINE_PROGRAMS:
        _lines(program, SEEN, BOUNDS, TILES, GROUPS * ROWS, COLUMNS, WHOLE, LISTED, RUN, TOGETHER, CHUNK)
    else:
        _ranks(program - LINE_PROGRAMS, SEEN, RANKS, ROWS, COLUMNS, RANK_ROWS, RANK_COLUMNS)


@triton.jit
def _ranks(
    program, SEEN, RANKS,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK_ROWS: tl.constexpr, RANK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes `RANKS [g, rows + 1, columns]` for `RANK_COLUMNS` columns of one group.

    Entry `[row, column]` is the number of earlier rows that see the column. The last row has the number of all rows
    that see it.
    """
    each: tl.constexpr = (COLUMNS + RANK_COLUMNS - 1) // RANK_COLUMNS
    column = program % each * RANK_COLUMNS + tl.arange(0, RANK_COLUMNS)
    group = (program // each).to(tl.int64)
    first = group * ROWS
    before = tl.zeros([RANK_COLUMNS], tl.int32)
    for start in range(0, ROWS, RANK_ROWS):
        row = start + tl.arange(0, RANK_ROWS)
        at = (first + row)[:, None] * COLUMNS + column[None, :]
        inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        here = (tl.load(SEEN + at, mask=inside, other=0) > 0).to(tl.int32)
        # `RANKS` has one row more than `SEEN` for each earlier group.
        tl.store(RANKS + group * COLUMNS + at, before[None, :] + tl.cumsum(here, 0) - here, mask=inside)
        before += tl.sum(here, 0)
    tl.store(RANKS + (first + group + ROWS) * COLUMNS + column, before, mask=column < COLUMNS)


@triton.jit
def _lines(
    program, SEEN, BOUNDS, TILES,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, LISTED: tl.constexpr,
    RUN: tl.constexpr, TOGETHER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes `BOUNDS` and `TILES` for the `TOGETHER` rows of this program; all groups together have `LINES` rows.

    From column `WHOLE` on, every visible tile needs a mask. If `RUN`, the run of a row is the longest run of its tiles
    that need no mask; if several are equally long, the last of them.
    """
    line = program * TOGETHER + tl.arange(0, TOGETHER)
    inside = (line < LINES)[:, None]
    wide = line.to(tl.int64)
    rows = SEEN + (wide * COLUMNS)[:, None]

    lo = tl.full([TOGETHER], COLUMNS, tl.int32)
    hi = tl.zeros([TOGETHER], tl.int32)
    every = tl.zeros([TOGETHER], tl.int32)
    unmasked = tl.zeros([TOGETHER], tl.int32)
    gap = tl.full([TOGETHER], -1, tl.int32)
    end = tl.zeros([TOGETHER], tl.int32)
    for start in range(0, COLUMNS, CHUNK):
        number, some, whole = _of_chunk(rows, inside, start, COLUMNS, WHOLE, CHUNK)
        if RUN:
            lo = tl.minimum(lo, tl.min(tl.where(some, number, COLUMNS), 1))
            hi = tl.maximum(hi, tl.max(tl.where(some, number + 1, 0), 1))
            gaps = tl.associative_scan(tl.where(whole, -1, number), 1, _larger)
            gaps = tl.maximum(gaps, gap[:, None])
            run = number - gaps
            longest = tl.max(run, 1)
            last = tl.max(tl.where(run == longest[:, None], number + 1, 0), 1)
            end = tl.where(longest >= unmasked, last, end)
            unmasked = tl.maximum(unmasked, longest)
            gap = tl.max(gaps, 1)
        else:
            unmasked += tl.sum(whole.to(tl.int32), 1)
        if LISTED:
            every += tl.sum(some.to(tl.int32), 1)

    bounds = BOUNDS + wide * 4
    full_lo = tl.zeros([TOGETHER], tl.int32)
    full_hi = full_lo
    if RUN:
        lo = tl.where(hi > 0, lo, 0)
        full_hi = tl.where(unmasked > 0, end, lo)
        full_lo = full_hi - unmasked
    masked = every - unmasked
    tl.store(bounds, masked if LISTED else lo, mask=line < LINES)
    if not (LISTED and RUN):
        tl.store(bounds + 1, every if LISTED else hi, mask=line < LINES)
    tl.store(bounds + 2, full_lo, mask=line < LINES)
    tl.store(bounds + 3, full_hi, mask=line < LINES)
    if LISTED:
        listed = TILES + wide[:, None] * COLUMNS
        masked_before = tl.zeros([TOGETHER], tl.int32)
        before_run = tl.zeros([TOGETHER], tl.int32)
        whole_before = masked
        for start in range(0, COLUMNS, CHUNK):
            number, some, whole = _of_chunk(rows, inside, start, COLUMNS, WHOLE, CHUNK)
            if RUN:
                whole = (full_lo[:, None] <= number) & (number < full_hi[:, None])
            masked_here = (some & ~whole).to(tl.int32)
            place = masked_before[:, None] + tl.cumsum(masked_here, 1) - 1
            masked_before += tl.sum(masked_here, 1)
            if RUN:
                before_run += tl.sum(tl.where(number < full_lo[:, None], masked_here, 0), 1)
                tl.store(listed + place, number, mask=masked_here != 0)
            else:
                whole_here = whole.to(tl.int32)
                whole_place = whole_before[:, None] + tl.cumsum(whole_here, 1) - 1
                whole_before += tl.sum(whole_here, 1)
                tl.store(listed + tl.where(whole, whole_place, place), number, mask=some)
        if RUN:
            tl.store(bounds + 1, before_run, mask=line < LINES)


@triton.jit
def _of_chunk(rows, inside, start, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr):
    """For `CHUNK` columns from `start` on: their numbers; whether each row sees the tile; whether it needs no mask."""
    number = start + tl.arange(0, CHUNK)[None, :]
    seen = tl.load(rows + number, mask=inside & (number < COLUMNS), other=0)
    return number, seen > 0, (seen > 1) & (number < WHOLE)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
