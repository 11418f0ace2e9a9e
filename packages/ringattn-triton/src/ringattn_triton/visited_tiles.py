# SPDX-License-Identifier: Apache-2.0
"""Which tiles each program visits, and which of them need a mask.

A table holds a range of tiles for each program where the visible tiles form runs, and a list where masks scatter them.
Segment ids, and ranges of positions in no order, may scatter visible tiles too, but the tiles that need no mask usually
still form one run: then only the tiles that need a mask are listed. A loop over a range prefetches further ahead than a
loop that loads tile numbers.
"""

import dataclasses
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int8, Int32
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.tiles import Tiles, tiles

from . import grouped_rows
from .kernel_inputs import power_of_two
from .kernels.visited_tiles import table as table_kernel
from .launch import launch

ENOUGH_PROGRAMS: Final = 4096
"""How many programs are enough for a launch: several for each slot of the largest GPUs, so that short programs fill the
time until the last long one ends."""
ELEMENTS: Final = 512
"""How many elements of a bitmap one warp reads at a time: few enough to stay in registers."""
RANK_ROWS: Final = 64
"""The most rows of a bitmap that a program reads at a time to compute ranks. Each program has few columns, so that
there are many programs."""


@dataclasses.dataclass(frozen=True)
class Ends:
    """Sizes with which the table kernel finds visible tiles from `first`, `last` and key positions that never decrease.

    `first`, `last`: whether queries have them. `first_batch`, `last_batch`, `keys_batch`: strides, 0 if rows agree.
    """

    by_keys: bool
    q_tile: int
    kv_tile: int
    q_length: int
    kv_length: int
    first: bool
    last: bool
    first_batch: int
    last_batch: int
    keys_batch: int


@dataclasses.dataclass(frozen=True)
class TableShape:
    """How a kernel reads a `Table` of `rows` tiles that its programs own and `columns` tiles that the programs visit.

    `grouped`: every batch row has its own table. `kv_heads`: so many key heads have their own; 1 if they share one.
    `listed`: the tiles that need a mask are listed by number. `run`: the tiles that need no mask form one run in each
    row; otherwise they are listed too. The programs of `heads_at_once` heads run side by side
    (`kernels.tile_loop.owned`).
    """

    listed: bool
    run: bool
    rows: int
    columns: int
    grouped: bool
    heads_at_once: int
    kv_heads: int = 1


class Table(NamedTuple):
    """For each tile that a program owns (row): which tiles it visits (columns), and which of them need a mask.

    `bounds` has four numbers for each row, in one of three forms (`TableShape`), which `tile_loop.visit` reads:

    - no list: `lo, hi, whole_lo, whole_hi`. A program visits the tiles `[lo, hi)`; the tiles `[whole_lo, whole_hi)`
      need no mask.
    - a list and a run: `masked, before, whole_lo, whole_hi`. The `masked` listed tiles need a mask; the first `before`
      of them precede the run `[whole_lo, whole_hi)`, which needs none and is not listed.
    - a list only: `masked, all, 0, 0`. Of `all` listed tiles, the first `masked` need a mask.

    `tiles` has the list of each row, or is `None`; entries past the counts are undefined. `ranks` says, for each row
    and column, how many earlier rows see the column. Its last row says how many rows see it in all. It is `None` unless
    asked for. `counters` are zeros, for kernels that count.
    """

    bounds: Int32[Array, "g rows 4"]
    tiles: Int32[Array, "g rows columns"] | None
    ranks: Int32[Array, "g rows+1 columns"] | None
    counters: Int32[Array, " count"]
    shape: TableShape


class Wanted(NamedTuple):
    """What a table holds: `listed` and `run` are those of `TableShape`, the others are arguments of `table`."""

    listed: bool
    run: bool
    ragged: bool
    """The last column always needs a mask."""
    ranked: bool = False
    counters: int = 1
    heads: int = 1
    rows_at_once: int = 1


def table(
    block: Block, q_tile: int, kv_tile: int, by_keys: bool = False, rows_at_once: int = ENOUGH_PROGRAMS,
    heads: int | None = None, ranked: bool = False, counters: int = 1,
) -> Table:  # fmt: skip
    """The `Table` of the key tiles that each query tile visits, or if `by_keys` of query tiles for each key tile.

    So many of the `heads` (default: the heads of one batch row) run side by side that they have `rows_at_once` rows in
    all. A tile that reaches past the last key, or if `by_keys` past the last query, always needs a mask. `ranked`:
    compute ranks; then no table is a list only. `counters`: how many counters to make.
    """
    # A list only has the tiles that need a mask before those that need none. Programs that wait for each other's ranks
    # must visit tiles in the order of their numbers (`hopper.backward_turns.steps_of`).
    run = block.bits is None or ranked
    # Ranks count only tiles that some head sees. Without a list, a program also visits the invisible tiles within a
    # run, and turns would wait for ever for these. Where positions are monotone, the tiles that some head sees have
    # no gaps: the least of `first` and the greatest of `last` over heads do not decrease.
    listed = block.bits is not None or block.q_segments is not None or not block.monotone
    ragged = by_keys and block.q_length % q_tile != 0
    heads = heads or (block.kv_heads if by_keys else block.q.shape[2])
    wanted = Wanted(listed, run, ragged, ranked, counters, heads, rows_at_once)
    if listed or block.padded or any(x is not None and x.shape[1] > 1 for x in (block.first, block.last)):
        return _of_codes([_coded(seen(block, q_tile, kv_tile), by_keys), None, None, None], None, wanted)
    bounds = block.first, block.last, block.kv_positions
    lengths, strides = (block.q_length, block.kv_length), (0 if x is None or len(x) == 1 else x[0].size for x in bounds)
    ends = Ends(by_keys, q_tile, kv_tile, *lengths, block.first is not None, block.last is not None, *strides)
    masked = ends.first or ends.last
    return _of_codes([None, *bounds[:2], block.kv_positions if masked else None], ends, wanted)


def of_bitmap(
    found: Tiles, listed: bool, run: bool, by_keys: bool, ragged: bool, ranked: bool = False, counters: int = 1
) -> Table:
    """The `Table` of the tiles `found`; the arguments are those of `Wanted` and of `table`."""
    wanted = Wanted(listed, run, ragged, ranked, counters)
    return _of_codes([_coded(found, by_keys), None, None, None], None, wanted)


def _coded(found: Tiles, by_keys: bool) -> Int8[Array, "g k rows columns"]:
    """The bitmap that the table kernel reads."""
    coded = found.some.astype(jnp.int8) + found.full.astype(jnp.int8)
    # XLA fuses the transpose with the bitmap; strided loads in the kernel would be slow.
    return jnp.swapaxes(coded, 2, 3) if by_keys else coded


def _of_codes(arrays: list[Any], ends: Ends | None, wanted: Wanted) -> Table:
    """A `Table` in one launch, from a bitmap (`_coded`), or if `ends` is given from `first`, `last` and key positions.

    `arrays` are these four.
    """
    listed, run, ragged, ranked, counters, heads, rows_at_once = wanted
    if ends is None:
        batch, kv_heads, rows, columns = arrays[0].shape
        arrays = [arrays[0].reshape(-1, rows, columns), *arrays[1:]]
    else:
        batch, kv_heads = max(len(x) for x in arrays if x is not None) if ends.first or ends.last else 1, 1
        sides = -(-ends.q_length // ends.q_tile), -(-ends.kv_length // ends.kv_tile)
        rows, columns = sides[::-1] if ends.by_keys else sides
    groups = batch * kv_heads
    chunk = min(power_of_two(columns), ELEMENTS)
    lines = min(ELEMENTS // chunk, power_of_two(groups * rows))
    line_programs = -(-groups * rows // lines)
    rank_rows = min(power_of_two(rows), RANK_ROWS)
    rank_columns = ELEMENTS // rank_rows
    rank_programs = groups * -(-columns // rank_columns) if ranked else 0
    bounds, listing, ranks, zeros = launch(
        table_kernel,
        arrays,
        [
            jax.ShapeDtypeStruct((groups, rows, 4), jnp.int32),
            jax.ShapeDtypeStruct((groups, rows, columns) if listed else (1,), jnp.int32),
            jax.ShapeDtypeStruct((groups, rows + 1, columns) if ranked else (1,), jnp.int32),
            jax.ShapeDtypeStruct((counters,), jnp.int32),
        ],
        grid=(line_programs + rank_programs,),
        warps=1,
        name="ringattn_table",
        E=ends,
        GROUPS=groups,
        ROWS=rows,
        COLUMNS=columns,
        WHOLE=columns - ragged,
        LISTED=listed,
        RUN=run,
        LINES_EACH=lines,
        CHUNK=chunk,
        LINE_PROGRAMS=line_programs,
        RANK_ROWS=rank_rows,
        RANK_COLUMNS=rank_columns,
        COUNT=counters,
        ZEROS=ELEMENTS,
    )
    shape = TableShape(listed, run, rows, columns, batch > 1, heads_at_once(rows, heads, rows_at_once), kv_heads)
    return Table(bounds, listing if listed else None, ranks if ranked else None, zeros, shape)


def heads_at_once(rows: int, heads: int, rows_at_once: int) -> int:
    """How many heads run side by side: the least power of two that gives `rows_at_once` rows and divides `heads`.

    If no power of two does both, the largest one that divides `heads`. Each head has `rows` programs.
    """
    enough = 1
    while enough * rows < rows_at_once and heads % (2 * enough) == 0:
        enough *= 2
    return enough


def seen(block: Block, q_tile: int, kv_tile: int) -> Tiles:
    """Which pairs of a query tile and a key tile have a visible entry (`some`), or visible entries only (`full`).

    Where the bias is differentiated, key heads share tiles: the bias may be that of several heads.
    """
    block, share = grouped_rows.query_of_each_row(block)
    q_tile //= share
    rows, columns = -(-block.q_length // q_tile), -(-block.kv_length // kv_tile)
    found = tiles(block.padded_to(rows * q_tile, columns * kv_tile), q_tile, kv_tile)
    return found if block.bias is None or block.bias_fixed else found.of_all_heads
