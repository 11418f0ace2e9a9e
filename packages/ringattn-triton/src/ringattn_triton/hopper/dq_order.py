# SPDX-License-Identifier: Apache-2.0
"""Reorders dq of the one-pass backward kernel, from the order of the tensor cores' registers to `[B, T, N, H]`.

A piece of dq, 64 queries by 64 dimensions, is added to memory in the order in which the registers of four warps hold
it: 16 contiguous bytes for each thread, 16 KiB for the piece. To add rows of 256 bytes, at the stride of a token, would
slow the whole backward pass by 7 to 12%.
"""

import triton
import triton.language as tl


@triton.jit
def finish_dq(
    SUMS, COUNTERS, BEFORE, DQ, F: tl.constexpr, PLAN: tl.constexpr, SCALE: tl.constexpr, FRESH: tl.constexpr
):  # fmt: skip
    """Writes `DQ [B, T, N, H] = BEFORE + SCALE * SUMS`, one piece for each program; `SUMS` is in register order.

    `FRESH`: there is no `BEFORE`. If `PLAN.ordered`, `COUNTERS` says how many turns have added to each tile. A tile to
    which none has added was never written, so its sums count as zeros.
    """
    PIECES: tl.constexpr = PLAN.pieces(F.head_dim)
    Q_TILES: tl.constexpr = (F.q_length + PLAN.q_tile - 1) // PLAN.q_tile
    program = tl.program_id(0)
    piece = program % PIECES
    tile = program // PIECES % Q_TILES
    head = program // (PIECES * Q_TILES) % F.heads
    batch = program // (PIECES * Q_TILES) // F.heads
    # Registers: 8 blocks of columns, 4 warps, 8 by 4 threads, 2 rows, 2 columns.
    at = program.to(tl.int64) * 4096 + tl.arange(0, 4096)
    if PLAN.ordered:
        sums = tl.load(SUMS + at, mask=tl.load(COUNTERS + 1 + program // PIECES) > 0, other=0.0)
    else:
        sums = tl.load(SUMS + at)
    sums = tl.reshape(sums, (8, 4, 8, 4, 2, 2))
    sums = tl.reshape(tl.permute(sums, (1, 4, 2, 0, 3, 5)), (64, 64))
    # The pieces of a tile's first 64 rows come first, then the pieces of the next 64 rows.
    SIDE_BY_SIDE: tl.constexpr = PIECES * 64 // PLAN.q_tile
    rows = tile * PLAN.q_tile + piece // SIDE_BY_SIDE * 64 + tl.arange(0, 64)
    dims = piece % SIDE_BY_SIDE * 64 + tl.arange(0, 64)
    at = ((batch.to(tl.int64) * F.q_length + rows)[:, None] * F.heads + head) * F.head_dim + dims[None, :]
    inside = (rows < F.q_length)[:, None] & (dims < F.head_dim)[None, :]
    dq = sums * SCALE
    if not FRESH:
        dq += tl.load(BEFORE + at, mask=inside, other=0.0)
    tl.store(DQ + at, dq.to(DQ.dtype.element_ty), mask=inside)
