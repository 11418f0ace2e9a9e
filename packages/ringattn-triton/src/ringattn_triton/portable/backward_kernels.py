# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""The two backward kernels for any GPU: `backward_keys` computes dk and dv, `backward_queries` computes dq.

A program of the first owns a tile of keys, a program of the second a tile of queries. No two programs write to the same
element. In `backward_keys` the rows of the scores are keys, so that scores are the left operand of the products for dk
and dv without a transpose.
"""

import triton
import triton.language as tl

from ..kernels.dropout import weights
from ..kernels.scores import (
    as_operand,
    backward_rows,
    bent,
    biases,
    derivatives,
    narrowed,
    of_head,
    scaled,
    with_per_head_gradient,
)
from ..kernels.tile_loop import in_registers, offset_of, over_visited, owned, vectors, visit
from ..kernels.tokens import of_keys, of_queries
from .bias_sums_kernel import keep_tile


@triton.jit
def backward_keys(
    Q, K, V, P, BOUNDS, TILES, DOUT, LSE, DELTA, DK, DV,
    F: tl.constexpr, T: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv: one program for each key tile of each key head.

    Programs of the first tiles, which most queries see under a causal mask, start first.
    """
    own, batch, kv_head = owned(tl.program_id(0), T, F.kv_heads)
    visited = visit(BOUNDS, TILES, batch, kv_head, own, T)
    keys = of_keys(P, batch, own * KV_TILE, F, KV_TILE, True)

    KV_RAGGED: tl.constexpr = F.kv_length % KV_TILE != 0
    DIM_RAGGED: tl.constexpr = F.head_dim != DIM
    VALUE_RAGGED: tl.constexpr = F.value_dim != VALUE_DIM
    columns = (own * KV_TILE + tl.arange(0, KV_TILE))[:, None]
    dims = tl.arange(0, DIM)[None, :]
    value_dims = tl.arange(0, VALUE_DIM)[None, :]
    wide_batch = batch.to(tl.int64)
    k_pointers = (
        K + wide_batch * F.k_batch + kv_head * F.k_head + (offset_of(columns, F.k_token, F.long_offsets) + dims)
    )
    k = vectors(k_pointers, columns, dims, F.kv_length, F.head_dim, KV_RAGGED, DIM_RAGGED)
    if IN_REGISTERS:
        k = in_registers(k, DIM)
    v_first = F.v_start + wide_batch * F.v_batch + kv_head * F.v_head
    v_pointers = V + v_first + (offset_of(columns, F.v_token, F.long_offsets) + value_dims)
    v = vectors(v_pointers, columns, value_dims, F.kv_length, F.value_dim, KV_RAGGED, VALUE_RAGGED)

    rows = tl.arange(0, Q_TILE)[:, None]
    dk = tl.zeros([KV_TILE, DIM], tl.float32)
    dv = tl.zeros([KV_TILE, VALUE_DIM], tl.float32)
    for member in range(F.group):
        head_number = kv_head * F.group + member
        head = of_head(P, batch, head_number, F)
        first = wide_batch * F.q_length * F.heads + head_number
        q_pointers = Q + first * F.head_dim + (rows * (F.heads * F.head_dim) + dims)
        dout_pointers = DOUT + first * F.value_dim + (rows * (F.heads * F.value_dim) + value_dims)
        row_at = (wide_batch * F.heads + head_number) * F.q_length
        given = (k, v, q_pointers, dout_pointers, LSE + row_at, DELTA + row_at, keys, head, P, batch)
        dk, dv = over_visited(_added_to_keys, (dk, dv), given, visited, F, T)

    if F.stacked:
        DV = DK + F.v_start
    token = wide_batch * F.kv_length * F.kv_heads + kv_head
    dk_at = token * F.head_dim + offset_of(columns, F.kv_heads * F.head_dim, F.long_offsets) + dims
    dv_at = token * F.value_dim + offset_of(columns, F.kv_heads * F.value_dim, F.long_offsets) + value_dims
    inside = columns < F.kv_length
    dk = scaled(dk, k, F)
    if KV_RAGGED or DIM_RAGGED:
        tl.store(DK + dk_at, dk, mask=inside & (dims < F.head_dim))
    else:
        tl.store(DK + dk_at, dk)
    if KV_RAGGED or VALUE_RAGGED:
        tl.store(DV + dv_at, dv, mask=inside & (value_dims < F.value_dim))
    else:
        tl.store(DV + dv_at, dv)


@triton.jit
def _added_to_keys(sums, given, tile, F: tl.constexpr, MASKED: tl.constexpr):
    """Adds what query tile number `tile` contributes to dk and dv (`sums`). Queries past the end add 0: lse is +inf."""
    dk, dv = sums
    k, v, q_pointers, dout_pointers, LSE, DELTA, keys, head, P, batch = given
    Q_TILE: tl.constexpr = q_pointers.shape[0]
    KV_TILE: tl.constexpr = k.shape[0]
    DIM: tl.constexpr = k.shape[1]
    VALUE_DIM: tl.constexpr = v.shape[1]
    Q_RAGGED: tl.constexpr = MASKED and F.q_length % Q_TILE != 0
    start = tile * Q_TILE
    rows = start + tl.arange(0, Q_TILE)
    dims = tl.arange(0, DIM)[None, :]
    value_dims = tl.arange(0, VALUE_DIM)[None, :]
    queries = of_queries(P, batch, head.number, start, F, Q_TILE, True)
    bias = biases(queries, keys, head, F)
    keep = 0
    if F.dropout:
        keep = weights(queries, keys, head, F.keep_weight, F, Q_TILE, KV_TILE, True)
    q_to = offset_of(start, F.heads * F.head_dim, F.long_offsets)
    q = vectors(q_pointers + q_to, rows[:, None], dims, F.q_length, F.head_dim, Q_RAGGED, F.head_dim != DIM)
    bent_product = bent(tl.dot(k, tl.trans(q), input_precision=F.precision), F)
    dout_to = offset_of(start, F.heads * F.value_dim, F.long_offsets)
    dout = vectors(
        dout_pointers + dout_to, rows[:, None], value_dims, F.q_length, F.value_dim, Q_RAGGED, F.value_dim != VALUE_DIM
    )
    dp = tl.dot(v, tl.trans(dout), input_precision=F.precision)
    lse, delta = backward_rows(LSE, DELTA, rows, rows, F, Q_RAGGED, True)
    dropped, _, dproduct = derivatives(bent_product, dp, lse, delta, bias, keep, queries, keys, head, F, MASKED, False)
    dv = tl.dot(as_operand(dropped, dout, F), dout, dv, input_precision=F.precision)
    dk = tl.dot(narrowed(dproduct, q, F), q, dk, input_precision=F.precision)
    return dk, dv


@triton.jit
def backward_queries(
    Q, K, V, P, BOUNDS, TILES, DOUT, LSE, DELTA, FIRST, DQ_BEFORE,
    DQ, DHEADS, DS,
    F: tl.constexpr, T: tl.constexpr, S: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, IN_REGISTERS: tl.constexpr, FRESH: tl.constexpr, IN_STRIPS: tl.constexpr,
):  # fmt: skip
    """Writes dq: one program for each query tile of each head.

    `DHEADS [B, N, T]` is what each query adds to the gradient of its head's ALiBi slope, if there are slopes. `FRESH`:
    there is no `DQ_BEFORE` to continue. `IN_STRIPS`: the launch computes one strip of query tiles and writes the
    gradients of its scores to `DS`; `FIRST` holds the number of the strip's first tile, and `S` is its
    `bias_gradient.Strips`. Without strips, `S` is `T`.
    """
    first_own = 0
    if IN_STRIPS:
        first_own = tl.load(FIRST)
    turn, batch, head_number = owned(tl.program_id(0), S, F.heads)
    own = first_own + S.rows - 1 - turn
    # The last strip may have fewer tiles than the others.
    if IN_STRIPS and own >= T.rows:
        return
    kv_head = head_number // F.group
    head = of_head(P, batch, head_number, F)
    visited = visit(BOUNDS, TILES, batch, kv_head, own, T)
    queries = of_queries(P, batch, head_number, own * Q_TILE, F, Q_TILE, False)

    Q_RAGGED: tl.constexpr = F.q_length % Q_TILE != 0
    DIM_RAGGED: tl.constexpr = F.head_dim != DIM
    VALUE_RAGGED: tl.constexpr = F.value_dim != VALUE_DIM
    line = own * Q_TILE + tl.arange(0, Q_TILE)
    rows = line[:, None]
    dims = tl.arange(0, DIM)[None, :]
    value_dims = tl.arange(0, VALUE_DIM)[None, :]
    wide_batch = batch.to(tl.int64)
    first = wide_batch * F.q_length * F.heads + head_number
    q_at = first * F.head_dim + offset_of(rows, F.heads * F.head_dim, F.long_offsets) + dims
    q = vectors(Q + q_at, rows, dims, F.q_length, F.head_dim, Q_RAGGED, DIM_RAGGED)
    if IN_REGISTERS:
        q = in_registers(q, DIM)
    dout_at = first * F.value_dim + offset_of(rows, F.heads * F.value_dim, F.long_offsets) + value_dims
    dout = vectors(DOUT + dout_at, rows, value_dims, F.q_length, F.value_dim, Q_RAGGED, VALUE_RAGGED)
    row_at = (wide_batch * F.heads + head_number) * F.q_length + line
    lse, delta = backward_rows(LSE, DELTA, row_at, line, F, Q_RAGGED, False)

    columns = tl.arange(0, KV_TILE)[:, None]
    k_pointers = K + wide_batch * F.k_batch + kv_head * F.k_head + (columns * F.k_token + dims)
    v_first = F.v_start + wide_batch * F.v_batch + kv_head * F.v_head
    v_pointers = V + v_first + (columns * F.v_token + value_dims)
    ds_at = 0
    if IN_STRIPS:
        row_of_tiles = ((batch * F.heads + head_number) * S.rows + own - first_own) * S.columns
        ds_at = DS + row_of_tiles.to(tl.int64) * (Q_TILE * KV_TILE)
    dq = tl.zeros([Q_TILE, DIM], tl.float32)
    dhead = tl.zeros([Q_TILE], tl.float32)
    dq, dhead = over_visited(
        _added_to_queries, (dq, dhead),
        (IN_STRIPS, q, dout, lse, delta, k_pointers, v_pointers, ds_at, queries, head, P, batch), visited, F, T,
    )  # fmt: skip
    dq = scaled(dq, q, F)
    if not FRESH:
        dq += vectors(DQ_BEFORE + q_at, rows, dims, F.q_length, F.head_dim, Q_RAGGED, DIM_RAGGED)
    if Q_RAGGED or DIM_RAGGED:
        tl.store(DQ + q_at, dq, mask=(rows < F.q_length) & (dims < F.head_dim))
    else:
        tl.store(DQ + q_at, dq)
    if F.slopes:
        tl.store(DHEADS + row_at, dhead, mask=line < F.q_length)


@triton.jit
def _added_to_queries(sums, given, tile, F: tl.constexpr, MASKED: tl.constexpr):
    """Adds what key tile number `tile` contributes to dq, and to each query's part of the slope's gradient."""
    dq, dhead = sums
    IN_STRIPS: tl.constexpr = given[0]
    _, q, dout, lse, delta, k_pointers, v_pointers, ds_at, queries, head, P, batch = given
    Q_TILE: tl.constexpr = q.shape[0]
    KV_TILE: tl.constexpr = k_pointers.shape[0]
    DIM: tl.constexpr = q.shape[1]
    VALUE_DIM: tl.constexpr = dout.shape[1]
    KV_RAGGED: tl.constexpr = MASKED and F.kv_length % KV_TILE != 0
    start = tile * KV_TILE
    columns = (start + tl.arange(0, KV_TILE))[:, None]
    dims = tl.arange(0, DIM)[None, :]
    value_dims = tl.arange(0, VALUE_DIM)[None, :]
    keys = of_keys(P, batch, start, F, KV_TILE, False)
    bias = biases(queries, keys, head, F)
    keep = 0
    if F.dropout:
        keep = weights(queries, keys, head, F.keep_weight, F, Q_TILE, KV_TILE, False)
    at = offset_of(start, F.k_token, F.long_offsets)
    k = vectors(k_pointers + at, columns, dims, F.kv_length, F.head_dim, KV_RAGGED, F.head_dim != DIM)
    bent_product = bent(tl.dot(q, tl.trans(k), input_precision=F.precision), F)
    at = offset_of(start, F.v_token, F.long_offsets)
    v = vectors(v_pointers + at, columns, value_dims, F.kv_length, F.value_dim, KV_RAGGED, F.value_dim != VALUE_DIM)
    dp = tl.dot(dout, tl.trans(v), input_precision=F.precision)
    _, ds, dproduct = derivatives(bent_product, dp, lse, delta, bias, keep, queries, keys, head, F, MASKED, KV_RAGGED)
    dhead = with_per_head_gradient(dhead, ds, queries, keys, F)
    if IN_STRIPS:
        keep_tile(ds_at + offset_of(tile, Q_TILE * KV_TILE, F.long_score_offsets), ds, F)
    dq = tl.dot(narrowed(dproduct, k, F), k, dq, input_precision=F.precision)
    return dq, dhead
