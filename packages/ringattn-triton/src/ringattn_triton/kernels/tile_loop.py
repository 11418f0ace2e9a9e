# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""The loop of a program over the tiles that it visits, and how it loads a tile of vectors.

`T` is `visited_tiles.TableShape`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Visit(NamedTuple):
    """One row of a table: `masked` steps to mask, and steps `[full_from, full_to)` that see everything.

    The first `before` tiles to mask lie before those; where tiles form no run, all are taken to.
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
    """The tile, batch row and head that the program of this number works on.

    Programs go through some heads `together`, tile by tile: few enough for their vectors to stay in the cache, and
    enough for no multiprocessor to be left alone with a long tile of the last head.
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
    """The number of the tile at a step of `[0, masked)`; past the last step, any number.

    Kernels load the number of a listed tile one step ahead, so that fetching the tile does not wait for it.
    """
    if T.listed:
        return tl.load(visited.listed + tl.minimum(step, T.columns - 1))
    else:
        return tl.where(step < visited.before, visited.lo + step, visited.after + (step - visited.before))


@triton.jit
def full_tile(visited, step, T: tl.constexpr):
    """The number of the tile at a step of `[full_from, full_to)`; past the last step, any number."""
    if T.run:
        return step
    else:
        return tl.load(visited.listed + tl.minimum(step, T.columns - 1))


@triton.jit
def moved(start, step: tl.constexpr, WIDE: tl.constexpr):
    """The offset of `start` steps; in int64 only where int32 is too narrow."""
    if WIDE:
        return start.to(tl.int64) * step
    else:
        return start * step


@triton.jit
def held(x, DIM: tl.constexpr):
    """The same tile in registers, as the left side of a product on Hopper: a product with 1 is exact.

    A product with a narrow tile reads as much of its left side as of its right one, and shared memory is too slow for
    both.
    """
    one = (tl.arange(0, DIM)[:, None] == tl.arange(0, DIM)[None, :]).to(x.dtype)
    return tl.dot(x, one).to(x.dtype)


@triton.jit
def vectors(pointers, tokens, dims, F_LENGTH, SIZE, TOKENS: tl.constexpr, DIMS: tl.constexpr):
    """A tile of vectors; what lies past the last token (`TOKENS`) or dimension (`DIMS`) is zero."""
    if TOKENS and DIMS:
        return tl.load(pointers, mask=(tokens < F_LENGTH) & (dims < SIZE), other=0.0)
    elif TOKENS:
        return tl.load(pointers, mask=tokens < F_LENGTH, other=0.0)
    elif DIMS:
        return tl.load(pointers, mask=dims < SIZE, other=0.0)
    else:
        return tl.load(pointers)
