# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
"""The kernel that writes a table: which tiles each row of tiles visits, from a bitmap or from positions that increase.

It also writes the table's ranks and zeroes its counters, because one launch is faster than three.
"""

import triton
import triton.language as tl


@triton.jit
def table(
    SEEN, FIRST, LAST, KEYS, BOUNDS, TILES, RANKS, COUNTERS,
    E: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    LISTED: tl.constexpr, RUN: tl.constexpr, LINES_EACH: tl.constexpr, CHUNK: tl.constexpr, LINE_PROGRAMS: tl.constexpr,
    RANK_ROWS: tl.constexpr, RANK_COLUMNS: tl.constexpr, COUNT: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Writes the arrays of a `Table` (`ringattn_triton.visited_tiles`); `COUNTERS` gets `COUNT` zeros.

    What a row sees of a column is a code: 0 for an invisible tile, 1 for a tile that needs a mask, 2 for a tile that
    needs none. The bitmap `SEEN [g, rows, columns]` holds the codes; if `E`, a `visited_tiles.Ends`, is given, they
    follow from positions that do not decrease (`_codes`). Each of the first `LINE_PROGRAMS` programs writes `BOUNDS`
    and `TILES` for `LINES_EACH` rows. Each other program writes `RANKS` for `RANK_COLUMNS` columns. All programs write
    zeros, `ZEROS` at a time.
    """
    program = tl.program_id(0)
    for start in range(program * ZEROS, COUNT, tl.num_programs(0) * ZEROS):
        at = start + tl.arange(0, ZEROS)
        tl.store(COUNTERS + at, tl.zeros([ZEROS], tl.int32), mask=at < COUNT)
    if program < LINE_PROGRAMS:
        _lines(
            program, (SEEN, FIRST, LAST, KEYS), BOUNDS, TILES, E, GROUPS, ROWS, COLUMNS, WHOLE, LISTED, RUN, LINES_EACH,
            CHUNK,
        )  # fmt: skip
    else:
        _ranks(program - LINE_PROGRAMS, (SEEN, FIRST, LAST, KEYS), RANKS, E, ROWS, COLUMNS, RANK_ROWS, RANK_COLUMNS)


@triton.jit
def _codes(arrays, group, row, column, inside, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The codes of what rows see of columns (`table`), where `inside`; elsewhere 0.

    In a tile of queries or keys whose positions do not decrease, the first and the last token have the least and the
    greatest of each number. The law is that of `ringattn_core.contract.tiles.overlaps`.
    """
    SEEN, FIRST, LAST, KEYS = arrays
    if E is None:
        return tl.load(SEEN + (group * ROWS + row).to(tl.int64) * COLUMNS + column, mask=inside, other=0)
    else:
        q_tile = column if E.by_keys else row
        kv_tile = row if E.by_keys else column
        some = inside
        full = inside & ((kv_tile + 1) * E.kv_tile <= E.kv_length)
        q_start = tl.minimum(q_tile * E.q_tile, E.q_length - 1)
        q_end = tl.minimum(q_tile * E.q_tile + E.q_tile, E.q_length) - 1
        if E.first or E.last:
            keys = KEYS + group * E.keys_batch
            kv_start = tl.minimum(kv_tile * E.kv_tile, E.kv_length - 1)
            kv_end = tl.minimum(kv_tile * E.kv_tile + E.kv_tile, E.kv_length) - 1
            least, greatest = tl.load(keys + kv_start), tl.load(keys + kv_end)
        if E.first:
            first = FIRST + group * E.first_batch
            some = some & (greatest >= tl.load(first + q_start))
            full = full & (least >= tl.load(first + q_end))
        if E.last:
            last = LAST + group * E.last_batch
            some = some & (least <= tl.load(last + q_end))
            full = full & (greatest <= tl.load(last + q_start))
        return some.to(tl.int32) + (some & full).to(tl.int32)


@triton.jit
def _ranks(
    program, arrays, RANKS,
    E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK_ROWS: tl.constexpr, RANK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes `RANKS [g, rows + 1, columns]` for `RANK_COLUMNS` columns of one group.

    Entry `[row, column]` is the number of earlier rows that see the column. The last row has the number of all rows
    that see it.
    """
    each: tl.constexpr = (COLUMNS + RANK_COLUMNS - 1) // RANK_COLUMNS
    column = program % each * RANK_COLUMNS + tl.arange(0, RANK_COLUMNS)
    group = program // each
    first = group.to(tl.int64) * ROWS
    before = tl.zeros([RANK_COLUMNS], tl.int32)
    for start in range(0, ROWS, RANK_ROWS):
        row = start + tl.arange(0, RANK_ROWS)
        at = (first + row)[:, None] * COLUMNS + column[None, :]
        inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        codes = _codes(arrays, group, row[:, None], column[None, :], inside, E, ROWS, COLUMNS)
        here = (codes > 0).to(tl.int32)
        # `RANKS` has one row more than there are rows of tiles for each earlier group.
        tl.store(RANKS + group * COLUMNS + at, before[None, :] + tl.cumsum(here, 0) - here, mask=inside)
        before += tl.sum(here, 0)
    tl.store(RANKS + (first + group + ROWS) * COLUMNS + column, before, mask=column < COLUMNS)


@triton.jit
def _lines(
    program, arrays, BOUNDS, TILES,
    E: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    LISTED: tl.constexpr, RUN: tl.constexpr, LINES_EACH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes `BOUNDS` and `TILES` for the `LINES_EACH` rows of this program, of the `ROWS` rows of each of `GROUPS`.

    From column `WHOLE` on, every visible tile needs a mask. If `RUN`, the run of a row is the longest run of its tiles
    that need no mask; if several are equally long, the last of them.
    """
    LINES: tl.constexpr = GROUPS * ROWS
    line = program * LINES_EACH + tl.arange(0, LINES_EACH)
    inside = (line < LINES)[:, None]
    wide = line.to(tl.int64)
    group = tl.minimum(line // ROWS, GROUPS - 1)[:, None]
    row = (line % ROWS)[:, None]

    lo = tl.full([LINES_EACH], COLUMNS, tl.int32)
    hi = tl.zeros([LINES_EACH], tl.int32)
    every = tl.zeros([LINES_EACH], tl.int32)
    unmasked = tl.zeros([LINES_EACH], tl.int32)
    gap = tl.full([LINES_EACH], -1, tl.int32)
    end = tl.zeros([LINES_EACH], tl.int32)
    for start in range(0, COLUMNS, CHUNK):
        number, some, whole = _of_chunk(arrays, group, row, inside, start, E, ROWS, COLUMNS, WHOLE, CHUNK)
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
    whole_lo = tl.zeros([LINES_EACH], tl.int32)
    whole_hi = whole_lo
    if RUN:
        lo = tl.where(hi > 0, lo, 0)
        whole_hi = tl.where(unmasked > 0, end, lo)
        whole_lo = whole_hi - unmasked
    masked = every - unmasked
    tl.store(bounds, masked if LISTED else lo, mask=line < LINES)
    if not (LISTED and RUN):
        tl.store(bounds + 1, every if LISTED else hi, mask=line < LINES)
    tl.store(bounds + 2, whole_lo, mask=line < LINES)
    tl.store(bounds + 3, whole_hi, mask=line < LINES)
    if LISTED:
        listed = TILES + wide[:, None] * COLUMNS
        masked_before = tl.zeros([LINES_EACH], tl.int32)
        before_run = tl.zeros([LINES_EACH], tl.int32)
        whole_before = masked
        for start in range(0, COLUMNS, CHUNK):
            number, some, whole = _of_chunk(arrays, group, row, inside, start, E, ROWS, COLUMNS, WHOLE, CHUNK)
            if RUN:
                whole = (whole_lo[:, None] <= number) & (number < whole_hi[:, None])
            masked_here = (some & ~whole).to(tl.int32)
            place = masked_before[:, None] + tl.cumsum(masked_here, 1) - 1
            masked_before += tl.sum(masked_here, 1)
            if RUN:
                before_run += tl.sum(tl.where(number < whole_lo[:, None], masked_here, 0), 1)
                tl.store(listed + place, number, mask=masked_here != 0)
            else:
                whole_here = whole.to(tl.int32)
                whole_place = whole_before[:, None] + tl.cumsum(whole_here, 1) - 1
                whole_before += tl.sum(whole_here, 1)
                tl.store(listed + tl.where(whole, whole_place, place), number, mask=some)
        if RUN:
            tl.store(bounds + 1, before_run, mask=line < LINES)


@triton.jit
def _of_chunk(
    arrays, group, row, inside, start,
    E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """For `CHUNK` columns from `start` on: their numbers; whether each row sees the tile; whether it needs no mask."""
    number = start + tl.arange(0, CHUNK)[None, :]
    seen = _codes(arrays, group, row, number, inside & (number < COLUMNS), E, ROWS, COLUMNS)
    return number, seen > 0, (seen > 1) & (number < WHOLE)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)
