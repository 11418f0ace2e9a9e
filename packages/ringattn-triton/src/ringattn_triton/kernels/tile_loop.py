# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""The loop of a program over the tiles that it visits, and how it loads a tile of vectors.

`T` is `visited_tiles.TableShape`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Visit(NamedTuple):
    """The tiles of one program: `masked` steps that need a mask, and steps `[full_from, full_to)` that need none.

    In a range, the tiles that need a mask are `before` tiles from tile `lo` on, and the tiles from tile `after` on.
    Otherwise `listed` points to their numbers; the first `before` of them come before the tiles that need no mask. If
    these form no run, they follow in the same list, and `before` is `masked`.
    """

    masked: Any
    full_from: Any
    full_to: Any
    lo: Any
    before: Any
    after: Any
    listed: Any


@triton.jit
def owned(turn, T: tl.constexpr, HEADS: tl.constexpr):
    """The tile, batch row and head that program number `turn` works on.

    Consecutive programs work on the same tile of `together` heads, then on the next tile of these heads. The heads are
    few enough for their vectors to stay in the cache, and enough to fill the device until the last long tile ends.
    """
    rest = turn % (T.rows * T.together)
    number = turn // (T.rows * T.together) * T.together + rest % T.together
    return rest // T.together, number // HEADS, number % HEADS


@triton.jit
def visit(BOUNDS, TILES, batch, row, T: tl.constexpr):
    """The tiles that the program of this batch row and tile visits."""
    at = row
    if T.grouped:
        at = batch * T.rows + row
    bounds = BOUNDS + at * 4
    first = tl.load(bounds)
    second = tl.load(bounds + 1)
    full_from = first
    full_to = second
    if T.run:
        full_from = tl.load(bounds + 2)
        full_to = tl.load(bounds + 3)
    if T.listed:
        before = second if T.run else first
        return Visit(first, full_from, full_to, 0, before, 0, TILES + at.to(tl.int64) * T.columns)
    else:
        before = full_from - first
        return Visit(before + second - full_to, full_from, full_to, first, before, full_to, 0)


@triton.jit
def masked_tile(visited, step, T: tl.constexpr):
    """The number of the tile at a step of `[0, masked)`; past the last step, an arbitrary number.

    Kernels load the number of a listed tile one step ahead, so that fetching the tile does not wait for it.
    """
    if T.listed:
        return tl.load(visited.listed + tl.minimum(step, T.columns - 1))
    else:
        return tl.where(step < visited.before, visited.lo + step, visited.after + (step - visited.before))


@triton.jit
def full_tile(visited, step, T: tl.constexpr):
    """The number of the tile at a step of `[full_from, full_to)`; past the last step, an arbitrary number."""
    if T.run:
        return step
    else:
        return tl.load(visited.listed + tl.minimum(step, T.columns - 1))


@triton.jit
def over_visited(ADDED: tl.constexpr, sums, given, visited, F: tl.constexpr, T: tl.constexpr):
    """Calls `ADDED` for every visited tile, and returns the last `sums`. Tiles that need no mask come first.

    `ADDED(sums, given, tile, F, MASKED)` adds what one tile contributes to the sums, and returns them.
    """
    ahead = full_tile(visited, visited.full_from, T)
    for step in tl.range(visited.full_from, visited.full_to):
        tile = full_tile(visited, step, T) if T.run else ahead
        ahead = full_tile(visited, step + 1, T)
        sums = ADDED(sums, given, tile, F, False)
    ahead = masked_tile(visited, 0, T)
    for step in tl.range(0, visited.masked):
        tile = masked_tile(visited, step, T) if not T.listed else ahead
        ahead = masked_tile(visited, step + 1, T)
        sums = ADDED(sums, given, tile, F, True)
    return sums


@triton.jit
def offset_of(index, stride: tl.constexpr, WIDE: tl.constexpr):
    """`index * stride`, in int64 if `WIDE`."""
    if WIDE:
        return index.to(tl.int64) * stride
    else:
        return index * stride


@triton.jit
def in_registers(x, DIM: tl.constexpr):
    """The tile `x` in registers, so that a product on Hopper can read its left operand from there.

    Triton leaves the result of a product in registers, and a product with the identity matrix is exact. From shared
    memory, products of narrow tiles would read as much of the left operand as of the right one, which is too slow.
    """
    one = (tl.arange(0, DIM)[:, None] == tl.arange(0, DIM)[None, :]).to(x.dtype)
    return tl.dot(x, one).to(x.dtype)


@triton.jit
def vectors(pointers, tokens, dims, F_LENGTH, SIZE, TOKENS: tl.constexpr, DIMS: tl.constexpr):
    """Loads a tile of vectors, with zeros past the last token if `TOKENS` and past the last dimension if `DIMS`."""
    if TOKENS and DIMS:
        return tl.load(pointers, mask=(tokens < F_LENGTH) & (dims < SIZE), other=0.0)
    elif TOKENS:
        return tl.load(pointers, mask=tokens < F_LENGTH, other=0.0)
    elif DIMS:
        return tl.load(pointers, mask=dims < SIZE, other=0.0)
    else:
        return tl.load(pointers)
