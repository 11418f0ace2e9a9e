# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""How the rows of the backward pass are made fit for kernels: `ringattn_core.contract.nonfinite.rows`.

In one pass over memory. Or in half of one, where `lse` and `delta` are made and the rest is looked at: as a rule it is
fit as it is.
"""

import triton
import triton.language as tl

from ..hopper import ROWS_AT
from .scores import LOG2_E


@triton.jit
def rows(
    Q, DOUT, OUT, REST, LSE, DLSE, SEEN, Q_TO, DOUT_TO, LSE_TO, DELTA, WHOLE,
    COUNT: tl.constexpr, HEADS: tl.constexpr, LENGTH: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Each program has `ROWS` of the `COUNT` rows, as they lie in memory: all heads of a token, then the next token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < COUNT
    at = _by_head(row, HEADS, LENGTH)
    lse = tl.load(LSE + at, mask=inside, other=0.0)
    seen = tl.load(SEEN + at, mask=inside, other=0) != 0

    of_value, there = _elements(row, inside, VALUE_DIM, VALUES)
    dout, out = _cotangents_and_outputs(DOUT, OUT, REST, of_value, there, SPLIT)
    whole, usable, bad = _judged(dout, out, lse, tl.load(DLSE + at, mask=inside, other=0.0), seen)
    tl.store(DOUT_TO + of_value, tl.where(usable[:, None], dout, 0.0).to(DOUT_TO.dtype.element_ty), mask=there)
    tl.store(LSE_TO + at, tl.where(bad, float("nan"), lse), mask=inside)
    tl.store(DELTA + at, tl.where(usable, whole, 0.0), mask=inside)
    tl.store(WHOLE + at, whole, mask=inside)

    of_query, there = _elements(row, inside, HEAD_DIM, DIM)
    q = _numbers(tl.load(Q + of_query, mask=there, other=0.0))
    tl.store(Q_TO + of_query, tl.where(seen[:, None], q, 0.0).to(q.dtype), mask=there)


@triton.jit
def judging(
    Q, DOUT, OUT, REST, LSE, DLSE, NOTHING, LSE_TO, DELTA, FOUND,
    COUNT: tl.constexpr, HEADS: tl.constexpr, LENGTH: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The `lse` of `rows` in units of log2, zero where nothing is seen, and its `delta`; `SHIFTED` if there is a dlse.

    Tiles are counted whose rows a kernel may not read as they came: in a product that sums rows what is no number
    counts even where it weighs nothing.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < COUNT
    at = _by_head(row, HEADS, LENGTH)
    lse = tl.load(LSE + at, mask=inside, other=0.0)
    seen = lse != -float("inf")
    dlse = tl.load(DLSE + at, mask=inside, other=0.0) if SHIFTED else tl.zeros_like(lse)

    of_value, there = _elements(row, inside, VALUE_DIM, VALUES)
    dout, out = _cotangents_and_outputs(DOUT, OUT, REST, of_value, there, SPLIT)
    whole, usable, bad = _judged(dout, out, lse, dlse, seen)
    tl.store(LSE_TO + at, tl.where(bad, float("nan"), tl.where(seen, lse * LOG2_E, 0.0)), mask=inside)
    tl.store(DELTA + at, tl.where(usable, whole, 0.0), mask=inside)
    if tl.max(tl.where(usable, 0, 1), 0) != 0:
        # Queries that are no numbers make the lse of a row that sees anything none: only others need be looked at.
        of_query, unseen = _elements(row, inside & (seen == 0), HEAD_DIM, DIM)
        q = tl.load(Q + of_query, mask=unseen, other=0.0)
        strange = tl.max(tl.where(tl.abs(q.to(tl.float32)) < float("inf"), 0, 1), 1)
        # Nor is a cotangent of what sees nothing read as it is: values may be so large that their product is infinite.
        loud = tl.max(tl.where(dout == 0.0, 0, 1), 1)
        if tl.max(tl.where(seen, bad.to(tl.int32), strange | loud), 0) != 0:
            tl.atomic_add(FOUND + ROWS_AT, 1, sem="relaxed")


@triton.jit
def mending_if_bad(
    Q, DOUT, LSE, MENDED_LSE, FOUND, Q_TO, DOUT_TO,
    COUNT: tl.constexpr, HEADS: tl.constexpr, LENGTH: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The `q` and `dout` of `rows` by a few programs, if `judging` found any to mend; else these hold anything."""
    if tl.load(FOUND + ROWS_AT) != 0:
        for number in range(tl.program_id(0), tl.cdiv(COUNT, ROWS), tl.num_programs(0)):
            row = number.to(tl.int64) * ROWS + tl.arange(0, ROWS)
            inside = row < COUNT
            at = _by_head(row, HEADS, LENGTH)
            lse = tl.load(MENDED_LSE + at, mask=inside, other=0.0)
            seen = tl.load(LSE + at, mask=inside, other=0.0) != -float("inf")
            usable = seen & (lse == lse)
            of_value, there = _elements(row, inside, VALUE_DIM, VALUES)
            dout = tl.load(DOUT + of_value, mask=there, other=0.0)
            tl.store(DOUT_TO + of_value, tl.where(usable[:, None], dout, 0.0).to(dout.dtype), mask=there)
            of_query, there = _elements(row, inside, HEAD_DIM, DIM)
            q = _numbers(tl.load(Q + of_query, mask=there, other=0.0))
            tl.store(Q_TO + of_query, tl.where(seen[:, None], q, 0.0).to(q.dtype), mask=there)


@triton.jit
def fit(Q, DOUT, MENDED_Q, MENDED_DOUT, FOUND, MENDED: tl.constexpr):
    """Where queries and cotangents are: as they came, or `MENDED` where `judging` found any that may not be read so."""
    if MENDED:
        bad = tl.load(FOUND + ROWS_AT) != 0
        return tl.where(bad, MENDED_Q, Q), tl.where(bad, MENDED_DOUT, DOUT)
    else:
        return Q, DOUT


@triton.jit
def _elements(row, inside, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Where the numbers of rows of `SIZE` are, and which of the `PADDED` ones there are."""
    number = tl.arange(0, PADDED)[None, :]
    return row[:, None] * SIZE + number, inside[:, None] & (number < SIZE)


@triton.jit
def _cotangents_and_outputs(DOUT, OUT, REST, at, there, SPLIT: tl.constexpr):
    """Cotangents as they are, and outputs with what rounding took from them if they are `SPLIT`."""
    dout = tl.load(DOUT + at, mask=there, other=0.0)
    out = tl.load(OUT + at, mask=there, other=0.0).to(tl.float32)
    if SPLIT:
        out += tl.load(REST + at, mask=there, other=0.0).to(tl.float32)
    return dout, out


@triton.jit
def _judged(dout, out, lse, dlse, seen):
    """`delta` as it is, which rows are fit to be used, and which see something and are not."""
    whole = tl.sum(tl.where(seen[:, None], dout, 0.0).to(tl.float32) * out, 1) - dlse
    good = (tl.abs(whole) < float("inf")) & (tl.abs(lse) < float("inf"))
    return whole, seen & good, seen & (good == 0)


@triton.jit
def _by_head(row, HEADS: tl.constexpr, LENGTH: tl.constexpr):
    """Where in `[B, N, T]` the rows of `[B, T, N]` are."""
    token = row // HEADS
    return (token // LENGTH * HEADS + row % HEADS) * LENGTH + token % LENGTH


@triton.jit
def _numbers(x):
    """The same with zero for what is no number."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)
