# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""The forward kernel for any GPU: the output of a tile of queries, by an online softmax over tiles of keys."""

import triton
import triton.language as tl

from ..kernels.dropout import weights
from ..kernels.scores import LOG2_E, as_operand, bent, biases, continued_rows, final_rows, of_head, scored
from ..kernels.tile_loop import in_registers, offset_of, over_visited, owned, vectors, visit
from ..kernels.tokens import of_keys, of_queries, of_rows, visible


@triton.jit
def forward(
    Q, K, V, P,
    BOUNDS, TILES, OUT_BEFORE, LSE_BEFORE, MAX_BEFORE, OUT, LSE, MAX,
    F: tl.constexpr, T: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, IN_REGISTERS: tl.constexpr, FRESH: tl.constexpr, FROM_LSE: tl.constexpr,
    SHARING: tl.constexpr,
):  # fmt: skip
    """Writes `OUT`, `LSE` and, if `F.max_logits`, `MAX`: one program for each query tile of each head.

    Programs of the last tiles, which see most keys under a causal mask, start first. `OUT_BEFORE`, `LSE_BEFORE` and
    `MAX_BEFORE` are the partial result to continue. `FRESH`: it has no output. `FROM_LSE`: it has `LSE_BEFORE`, that of
    earlier keys or of sinks. `T` is a `visited_tiles.TableShape`.

    `SHARING` query heads of one key head share a tile (`Schedule.sharing`). Of its `Q_TILE` rows,
    the first `SHARING` are the first query in each of these heads, the next are the second query, and so on.
    """
    turn, batch, number = owned(tl.program_id(0), T, F.heads // SHARING)
    own = T.rows - 1 - turn
    head_number = number * SHARING
    kv_head = head_number // F.group
    head = of_head(P, batch, head_number, F)
    visited = visit(BOUNDS, TILES, batch, kv_head, own, T)
    Q_RAGGED: tl.constexpr = F.q_length % (Q_TILE // SHARING) != 0
    rows = own * Q_TILE + tl.arange(0, Q_TILE)
    if SHARING == 1:
        queries = of_queries(P, batch, head_number, own * Q_TILE, F, Q_TILE, False)
    else:
        head_number += rows % SHARING
        rows = rows // SHARING
        queries = of_rows(P, batch, 0, rows, 0, F, Q_RAGGED, False)

    dims = tl.arange(0, DIM)
    value_dims = tl.arange(0, VALUE_DIM)
    wide_batch = batch.to(tl.int64)
    DIM_RAGGED: tl.constexpr = F.head_dim != DIM
    VALUE_RAGGED: tl.constexpr = F.value_dim != VALUE_DIM
    q_at = wide_batch * F.q_length * F.heads * F.head_dim
    q_row = offset_of(rows, F.heads * F.head_dim, F.long_offsets) + head_number * F.head_dim
    q_pointers = Q + q_at + q_row[:, None] + dims[None, :]
    q = vectors(q_pointers, rows[:, None], dims[None, :], F.q_length, F.head_dim, Q_RAGGED, DIM_RAGGED)
    if IN_REGISTERS:
        q = in_registers(q, DIM)

    columns = tl.arange(0, KV_TILE)
    k_pointers = K + wide_batch * F.k_batch + kv_head * F.k_head + (columns[None, :] * F.k_token + dims[:, None])
    v_first = F.v_start + wide_batch * F.v_batch + kv_head * F.v_head
    v_pointers = V + v_first + (columns[:, None] * F.v_token + value_dims[None, :])

    lse_at = wide_batch * F.heads * F.q_length + head_number * F.q_length + rows
    out_row = offset_of(rows, F.heads * F.value_dim, F.long_offsets) + head_number * F.value_dim
    out_at = wide_batch * F.q_length * F.heads * F.value_dim + out_row[:, None] + value_dims[None, :]
    if FRESH:
        acc = tl.zeros([Q_TILE, VALUE_DIM], tl.float32)
    else:
        acc = vectors(
            OUT_BEFORE + out_at, rows[:, None], value_dims[None, :], F.q_length, F.value_dim, Q_RAGGED, VALUE_RAGGED
        )
        if F.dropout:
            acc = acc / F.keep_weight
    if FROM_LSE:
        top, total = continued_rows(tl.load(LSE_BEFORE + lse_at, mask=rows < F.q_length, other=-float("inf")))
    else:
        top = tl.full([Q_TILE], -float("inf"), tl.float32)
        total = tl.zeros([Q_TILE], tl.float32)
    sums = (acc, top, total)
    if F.max_logits:
        largest = tl.full([Q_TILE], -float("inf"), tl.float32)
        if FROM_LSE:
            largest = tl.load(MAX_BEFORE + lse_at, mask=rows < F.q_length, other=-float("inf")) * LOG2_E
        sums = (acc, top, total, largest)

    given = (q, k_pointers, v_pointers, queries, head, P, batch)
    sums = over_visited(continued, sums, given, visited, F, T)
    acc, top, total = sums[0], sums[1], sums[2]
    lse, factor = final_rows(top, total, F)
    out = (acc * factor[:, None]).to(OUT.dtype.element_ty)
    if Q_RAGGED or VALUE_RAGGED:
        tl.store(OUT + out_at, out, mask=(rows < F.q_length)[:, None] & (value_dims < F.value_dim)[None, :])
    else:
        tl.store(OUT + out_at, out)
    tl.store(LSE + lse_at, lse, mask=rows < F.q_length)
    if F.max_logits:
        tl.store(MAX + lse_at, sums[3] / LOG2_E, mask=rows < F.q_length)


@triton.jit
def continued(sums, given, tile, F: tl.constexpr, MASKED: tl.constexpr):
    """One step of the online softmax, over key tile number `tile`; returns the updated `sums`.

    `sums` are `(acc, top, total)`: `top` is the row maximum in units of log2, or the log-sum-exp that the softmax began
    from. The weighted values `acc` and the weights `total` are summed relative to it. If `F.max_logits`, the largest
    score follows, in units of log2. Dropout only sets weights to zero here; `final_rows` multiplies the output by
    `F.keep_weight`. Weights multiplied here would be rounded to half precision: a query that sees one key would get a
    less exact copy of its value.
    """
    acc, top, total = sums[0], sums[1], sums[2]
    q, k_pointers, v_pointers, queries, head, P, batch = given
    Q_TILE: tl.constexpr = q.shape[0]
    DIM: tl.constexpr = q.shape[1]
    KV_TILE: tl.constexpr = v_pointers.shape[0]
    VALUE_DIM: tl.constexpr = v_pointers.shape[1]
    KV_RAGGED: tl.constexpr = MASKED and F.kv_length % KV_TILE != 0
    start = tile * KV_TILE
    columns = start + tl.arange(0, KV_TILE)
    dims = tl.arange(0, DIM)
    value_dims = tl.arange(0, VALUE_DIM)
    at = offset_of(tile, KV_TILE * F.k_token, F.long_offsets)
    k = vectors(k_pointers + at, columns[None, :], dims[:, None], F.kv_length, F.head_dim, KV_RAGGED, F.head_dim != DIM)
    keys = of_keys(P, batch, start, F, KV_TILE, False)
    bias = biases(queries, keys, head, F)
    if F.dropout:
        keep = weights(queries, keys, head, 1.0, F, Q_TILE, KV_TILE, False)
    s = scored(bent(tl.dot(q, k, input_precision=F.precision), F), bias, queries, keys, head, F)
    if MASKED:
        s = tl.where(visible(queries, keys, head, F, KV_RAGGED, True), s, -float("inf"))
    most = tl.max(s, 1) * F.fold
    now = tl.maximum(top, most)
    base = now
    # A bias may forbid entries, so a row may see nothing even of a tile that needs no mask.
    if MASKED or F.bias:
        base = tl.where(now == -float("inf"), 0.0, now)
    p = tl.exp2(s * F.fold - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    if F.dropout:
        p = p * keep
    at = offset_of(tile, KV_TILE * F.v_token, F.long_offsets)
    v = vectors(
        v_pointers + at, columns[:, None], value_dims[None, :], F.kv_length, F.value_dim, KV_RAGGED,
        F.value_dim != VALUE_DIM,
    )  # fmt: skip
    acc = tl.dot(as_operand(p, v, F), v, acc * shrink[:, None], input_precision=F.precision)
    if F.max_logits:
        return acc, now, total, tl.maximum(sums[3], most)
    else:
        return acc, now, total
