# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""The loop of a program over the tiles that it visits, and how a program loads a tile of vectors.

In every function `T` is a `ringattn_triton.visited_tiles.TableShape`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Visit(NamedTuple):
    """The tiles that a program visits: `masked` tiles that need a mask, and `whole_to - whole_from` that need none.

    There are three forms:

    - no list (not `T.listed`): tiles `whole_from` to `whole_to - 1` need no mask. `before` tiles from `lo` on, and the
      other tiles from `after` on, need one.
    - a list and a run (`T.listed` and `T.run`): tiles `whole_from` to `whole_to - 1` need no mask. `listed` points to
      the numbers of the tiles that need one; the first `before` of these tiles precede the run.
    - a list only: `listed` points to the numbers of all tiles. The first `masked` entries need a mask, and entries
      `whole_from` to `whole_to - 1` need none. `before` is `masked`.
    """

    masked: Any
    whole_from: Any
    whole_to: Any
    lo: Any
    before: Any
    after: Any
    listed: Any


@triton.jit
def owned(turn, T: tl.constexpr, HEADS: tl.constexpr):
    """The tile, batch row and head of turn number `turn`; a turn is the work on one tile of one head.

    Consecutive turns work on the same tile of `T.heads_at_once` heads, then on the next tile of these heads.
    `T.heads_at_once` is small enough for the data of these heads to stay in the cache, and large enough to fill the
    device until the last long tile ends.
    """
    rest = turn % (T.rows * T.heads_at_once)
    number = turn // (T.rows * T.heads_at_once) * T.heads_at_once + rest % T.heads_at_once
    return rest // T.heads_at_once, number // HEADS, number % HEADS


@triton.jit
def table_of(batch, kv_head, T: tl.constexpr):
    """The number of the table of a batch row and key head, which may share it with others."""
    number = 0
    if T.grouped:
        number = batch * T.kv_heads
    if T.kv_heads > 1:
        number += kv_head
    return number


@triton.jit
def visit(BOUNDS, TILES, batch, kv_head, row, T: tl.constexpr):
    """Loads the `Visit` of the program that owns tile number `row`, from the table of a batch row and key head."""
    at = table_of(batch, kv_head, T) * T.rows + row
    bounds = BOUNDS + at * 4
    first = tl.load(bounds)
    second = tl.load(bounds + 1)
    whole_from = first
    whole_to = second
    if T.run:
        whole_from = tl.load(bounds + 2)
        whole_to = tl.load(bounds + 3)
    if T.listed:
        before = second if T.run else first
        return Visit(first, whole_from, whole_to, 0, before, 0, TILES + at.to(tl.int64) * T.columns)
    else:
        before = whole_from - first
        return Visit(before + second - whole_to, whole_from, whole_to, first, before, whole_to, 0)


@triton.jit
def masked_tile(visited, step, T: tl.constexpr):
    """The number of the tile with a mask that a program visits at `0 <= step < masked`; arbitrary past the last step.

    Kernels load the number of a listed tile one step ahead, so that fetching the tile does not wait for the number.
    """
    if T.listed:
        return tl.load(visited.listed + tl.minimum(step, T.columns - 1))
    else:
        return tl.where(step < visited.before, visited.lo + step, visited.after + (step - visited.before))


@triton.jit
def whole_tile(visited, step, T: tl.constexpr):
    """The number of the tile without a mask visited at `whole_from <= step < whole_to`; arbitrary past the last
    step."""
    if T.run:
        return step
    else:
        return tl.load(visited.listed + tl.minimum(step, T.columns - 1))


@triton.jit
def over_visited(ADDED: tl.constexpr, sums, given, visited, F: tl.constexpr, T: tl.constexpr):
    """Calls `ADDED` for each tile of `visited`, tiles that need no mask first, and returns the final sums.

    `ADDED(sums, given, tile, F, MASKED)` returns `sums` plus what tile number `tile` contributes. `given` is passed to
    every call. `MASKED`: the tile needs a mask.
    """
    ahead = whole_tile(visited, visited.whole_from, T)
    for step in tl.range(visited.whole_from, visited.whole_to):
        tile = whole_tile(visited, step, T) if T.run else ahead
        ahead = whole_tile(visited, step + 1, T)
        sums = ADDED(sums, given, tile, F, False)
    ahead = masked_tile(visited, 0, T)
    for step in tl.range(0, visited.masked):
        tile = masked_tile(visited, step, T) if not T.listed else ahead
        ahead = masked_tile(visited, step + 1, T)
        sums = ADDED(sums, given, tile, F, True)
    return sums


@triton.jit
def offset_of(index, stride: tl.constexpr, WIDE: tl.constexpr):
    """`index * stride`, computed in int64 if `WIDE`."""
    if WIDE:
        return index.to(tl.int64) * stride
    else:
        return index * stride


@triton.jit
def in_registers(x, DIM: tl.constexpr):
    """Moves the tile `x` to registers, so that products on Hopper can read it there as their left operand.

    Triton leaves the result of a product in registers, so this multiplies `x` by the identity matrix, which is exact.
    From shared memory, products of narrow tiles would read as much of the left operand as of the right one, which is
    too slow.
    """
    one = (tl.arange(0, DIM)[:, None] == tl.arange(0, DIM)[None, :]).to(x.dtype)
    return tl.dot(x, one).to(x.dtype)


@triton.jit
def vectors(pointers, tokens, dims, LENGTH, SIZE, MASK_TOKENS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """Loads a tile of vectors; zeros from token `LENGTH` on if `MASK_TOKENS`, and from `SIZE` on if `MASK_DIMS`."""
    if MASK_TOKENS and MASK_DIMS:
        return tl.load(pointers, mask=(tokens < LENGTH) & (dims < SIZE), other=0.0)
    elif MASK_TOKENS:
        return tl.load(pointers, mask=tokens < LENGTH, other=0.0)
    elif MASK_DIMS:
        return tl.load(pointers, mask=dims < SIZE, other=0.0)
    else:
        return tl.load(pointers)
