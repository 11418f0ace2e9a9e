# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Kernels of a few lines, each of which shows one thing that the backend's kernels rely on."""

import triton
import triton.language as tl


@triton.jit
def product(A, B, OUT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    k = tl.arange(0, K)
    a = tl.load(A + m * K + k[None, :])
    b = tl.trans(tl.load(B + tl.arange(0, N)[:, None] * K + k[None, :]))
    tl.store(OUT + m * N + n, tl.dot(a, b, input_precision=PRECISION))


@triton.jit
def added(X, TOTAL, OUT, N: tl.constexpr, TILE: tl.constexpr):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.load(TOTAL + i, mask=i < N, other=0.0)
    tl.store(OUT + i, total + tl.load(X + i, mask=i < N, other=0.0), mask=i < N)


@triton.jit
def faulty(X, TOTAL, OUT, N: tl.constexpr, TILE: tl.constexpr, FAULT: tl.constexpr):
    """Breaks one rule of memory, whichever is named."""
    p = tl.program_id(0)
    i = p * TILE + tl.arange(0, TILE)
    x = tl.load(X + i, mask=i < N, other=0.0)
    if FAULT == "load past the end":
        x += tl.load(X + i)
    elif FAULT == "load before the start":
        x += tl.load(X + (i - TILE), mask=i < N, other=0.0)
    elif FAULT == "use of what a mask left out":
        x = tl.sum(tl.load(X + i, mask=i < N), 0) + x
    elif FAULT == "another program's part":
        x += tl.load(TOTAL + (N - 1 - i), mask=i < N, other=0.0)
    elif FAULT == "read after write":
        tl.store(OUT + i, x, mask=i < N)
        x += tl.load(TOTAL + i, mask=i < N, other=0.0)
    elif FAULT == "write to an operand":
        tl.store(X + i, x, mask=i < N)
    if FAULT == "store past the end":
        tl.store(OUT + i, x)
    elif FAULT == "two programs write":
        tl.store(OUT + tl.arange(0, TILE), x)
    elif FAULT == "an element left out":
        tl.store(OUT + i, x, mask=i < N - 1)
    else:
        tl.store(OUT + i, x, mask=i < N)


@triton.jit
def jumping(X, OUT, SIZE: tl.constexpr):
    """Reads where the largest element says."""
    i = tl.arange(0, SIZE)
    x = tl.load(X + i)
    tl.store(OUT + i, x + tl.load(X + tl.max(x, 0).to(tl.int32)))
