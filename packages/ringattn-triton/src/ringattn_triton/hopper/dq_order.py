# SPDX-License-Identifier: Apache-2.0
"""The order in which dq of the one-pass backward kernel lies in memory, and its conversion to `[B, T, N, H]`.

A tile of dq is added to memory in squares of 64 queries by 64 dimensions. A square lies in the order in which the
registers of four warps hold it (*register order*): 16 contiguous bytes for each thread, 16 KiB in all. To add rows of
256 bytes, at the stride of a token, would slow the whole backward pass down.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .plans import SQUARE


@gluon.jit
def in_register_order(x):
    """Reorders a product `[64, 64]` to `[16, 256]`, so that each thread stores 16 contiguous bytes at a time."""
    # Rows: 4 warps, 2 registers, 8 threads; columns: 8 registers, 4 threads, 2 registers.
    return gl.reshape(gl.permute(gl.reshape(x, (4, 2, 8, 8, 4, 2)), (3, 0, 2, 4, 1, 5)), (16, 256))


@triton.jit
def from_register_order(x):
    """The inverse of `in_register_order`."""
    # Registers: 8 blocks of columns, 4 warps, 8 by 4 threads, 2 rows, 2 columns.
    return tl.reshape(tl.permute(tl.reshape(x, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5)), (64, 64))


@triton.jit
def finish_dq(
    SUMS, COUNTERS, BEFORE, DQ, F: tl.constexpr, PLAN: tl.constexpr, SCALE: tl.constexpr, FRESH: tl.constexpr
):  # fmt: skip
    """Writes `DQ [B, T, N, H] = BEFORE + SCALE * SUMS`, one square for each program; `SUMS` is in register order.

    `FRESH`: there is no `BEFORE`. If `PLAN.ordered`, `COUNTERS` says how many turns have added to each tile. A tile to
    which none has added was never written, so its sums count as zeros.
    """
    SQUARES: tl.constexpr = PLAN.squares(F.head_dim)
    Q_TILES: tl.constexpr = (F.q_length + PLAN.q_tile - 1) // PLAN.q_tile
    program = tl.program_id(0)
    square = program % SQUARES
    tile = program // SQUARES % Q_TILES
    head = program // (SQUARES * Q_TILES) % F.heads
    batch = program // (SQUARES * Q_TILES) // F.heads
    at = program.to(tl.int64) * SQUARE + tl.arange(0, SQUARE)
    if PLAN.ordered:
        sums = tl.load(SUMS + at, mask=tl.load(COUNTERS + 1 + program // SQUARES) > 0, other=0.0)
    else:
        sums = tl.load(SUMS + at)
    sums = from_register_order(sums)
    # The squares of a tile's first 64 rows come first, then the squares of the next 64 rows.
    SIDE_BY_SIDE: tl.constexpr = SQUARES * 64 // PLAN.q_tile
    rows = tile * PLAN.q_tile + square // SIDE_BY_SIDE * 64 + tl.arange(0, 64)
    dims = square % SIDE_BY_SIDE * 64 + tl.arange(0, 64)
    at = ((batch.to(tl.int64) * F.q_length + rows)[:, None] * F.heads + head) * F.head_dim + dims[None, :]
    inside = (rows < F.q_length)[:, None] & (dims < F.head_dim)[None, :]
    dq = sums * SCALE
    if not FRESH:
        dq += tl.load(BEFORE + at, mask=inside, other=0.0)
    tl.store(DQ + at, dq.to(DQ.dtype.element_ty), mask=inside)
