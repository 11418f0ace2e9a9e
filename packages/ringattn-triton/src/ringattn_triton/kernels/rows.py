# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""How the rows of the backward pass are made fit for kernels, in one pass over memory: `ringattn_core.finite.rows`."""

import triton
import triton.language as tl


@triton.jit
def rows(
    Q, DOUT, OUT, REST, LSE, DLSE, SEEN, Q_TO, DOUT_TO, LSE_TO, DELTA, WHOLE,
    COUNT: tl.constexpr, HEADS: tl.constexpr, LENGTH: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIM: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Each program has `ROWS` of the `COUNT` rows, as they lie in memory: all heads of a token, then the next token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < COUNT
    token = row // HEADS
    at = (token // LENGTH * HEADS + row % HEADS) * LENGTH + token % LENGTH
    lse = tl.load(LSE + at, mask=inside, other=0.0)
    seen = tl.load(SEEN + at, mask=inside, other=0) != 0

    values = tl.arange(0, VALUES)[None, :]
    of_value = row[:, None] * VALUE_DIM + values
    there = inside[:, None] & (values < VALUE_DIM)
    dout = tl.where(seen[:, None], tl.load(DOUT + of_value, mask=there, other=0.0), 0.0)
    out = tl.load(OUT + of_value, mask=there, other=0.0).to(tl.float32)
    if SPLIT:
        out += tl.load(REST + of_value, mask=there, other=0.0).to(tl.float32)
    whole = tl.sum(dout.to(tl.float32) * out, 1) - tl.load(DLSE + at, mask=inside, other=0.0)
    good = (tl.abs(whole) < float("inf")) & (tl.abs(lse) < float("inf"))
    usable = seen & good
    tl.store(DOUT_TO + of_value, tl.where(usable[:, None], dout, 0.0).to(DOUT_TO.dtype.element_ty), mask=there)
    tl.store(LSE_TO + at, tl.where(seen & (good == 0), float("nan"), lse), mask=inside)
    tl.store(DELTA + at, tl.where(usable, whole, 0.0), mask=inside)
    tl.store(WHOLE + at, whole, mask=inside)

    dims = tl.arange(0, DIM)[None, :]
    of_query = row[:, None] * HEAD_DIM + dims
    there = inside[:, None] & (dims < HEAD_DIM)
    q = tl.load(Q + of_query, mask=there, other=0.0)
    tl.store(Q_TO + of_query, tl.where(tl.abs(q.to(tl.float32)) < float("inf"), q, 0.0).to(q.dtype), mask=there)
