# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""Which tiles a program goes through, as its table says, and how a tile of vectors is read.

`V` is `tables.Visits`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Visit(NamedTuple):
    """One row of a table: `masked` steps to mask, and steps `[full_from, full_to)` that see everything."""

    masked: Any
    full_from: Any
    full_to: Any
    lo: Any
    before: Any
    after: Any
    listed: Any


@triton.jit
def owned(turn, V: tl.constexpr, HEADS: tl.constexpr):
    """The number of the tile that it is some program's `turn` to work on, its batch row and its head.

    Some heads go `together`, tile by tile: few enough for their vectors to stay in the cache, and enough for no
    multiprocessor to be left alone with a long tile of the last head.
    """
    rest = turn % (V.rows * V.together)
    number = turn // (V.rows * V.together) * V.together + rest % V.together
    return rest // V.together, number // HEADS, number % HEADS


@triton.jit
def visit(TABLE, TILES, batch, row, V: tl.constexpr):
    """What the program of this batch row and tile goes through."""
    at = row
    if V.grouped:
        at = batch * V.rows + row
    bounds = TABLE + at * 4
    first = tl.load(bounds)
    second = tl.load(bounds + 1)
    full_from = first
    full_to = second
    if V.run:
        full_from = tl.load(bounds + 2)
        full_to = tl.load(bounds + 3)
    if V.listed:
        return Visit(first, full_from, full_to, 0, 0, 0, TILES + at.to(tl.int64) * V.columns)
    else:
        before = full_from - first
        return Visit(before + second - full_to, full_from, full_to, first, before, full_to, 0)


@triton.jit
def masked_tile(visited, step, V: tl.constexpr):
    """The number of the tile at a step of `[0, masked)`; for the step after the last, any number.

    Where it is listed kernels ask for it a step `ahead`, and need not wait for it before they fetch the tile.
    """
    if V.listed:
        return tl.load(visited.listed + tl.minimum(step, V.columns - 1))
    else:
        return tl.where(step < visited.before, visited.lo + step, visited.after + (step - visited.before))


@triton.jit
def full_tile(visited, step, V: tl.constexpr):
    """The number of the tile at a step of `[full_from, full_to)`; for the step after the last, any number."""
    if V.run:
        return step
    else:
        return tl.load(visited.listed + tl.minimum(step, V.columns - 1))


@triton.jit
def moved(start, step: tl.constexpr, WIDE: tl.constexpr):
    """How far `start` steps go; in int64 only where int32 is too narrow."""
    if WIDE:
        return start.to(tl.int64) * step
    else:
        return start * step


@triton.jit
def held(x, DIM: tl.constexpr):
    """The same tile in the registers that a product on Hopper would leave it in, where others can take it from.

    A product with a narrow tile reads as much of its left side as of its right one, and shared memory is too slow for
    both. What multiplies by one is exact, NaN included.
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
