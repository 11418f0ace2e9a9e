# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""How the gradient of a tile of queries is computed, from the one given on; what each row adds to its head's slope."""

import triton
import triton.language as tl

from .bias_sums import keep_tile
from .derivatives import derivatives, row_facts
from .dropout import keep_bits, weights
from .packing import sources
from .rows import fit
from .scores import Inputs, bent, biases, distance, in_columns, of_head, of_keys, of_queries
from .tiles import full_tile, held, masked_tile, moved, owned, vectors, visit


@triton.jit
def backward_queries(
    Q, KV, Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
    MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX, OWN_K, OWN_V, FOUND,
    TABLE, TILES, DOUT, LSE, DELTA, MENDED_Q, MENDED_DOUT, FIRST, DQ_BEFORE, DQ, DSLOPES, DS, KEPT_BITS,
    F: tl.constexpr, V: tl.constexpr, S: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HELD: tl.constexpr, FRESH: tl.constexpr, KEPT: tl.constexpr,
    BITS_KEPT: tl.constexpr, MENDED: tl.constexpr,
):  # fmt: skip
    """One program for each tile of queries of each head; `DSLOPES` is `[B, N, T]`, or unused where there are none.

    `FRESH` says that there is no gradient before, and nothing of it is read. If `KEPT` the tiles are those of a strip
    alone, from the one on that `FIRST` holds, and `DS` is given the derivatives by their scores: `S` is
    `bias_gradient.Strips`. If `BITS_KEPT`, `KEPT_BITS` is given what survives dropout.
    `MENDED` says that there are queries and cotangents to read if those that came are not fit.
    """
    first_own = 0
    if KEPT:
        first_own = tl.load(FIRST)
    turn, batch, head_number = owned(tl.program_id(0), S, F.heads)
    own = first_own + S.rows - 1 - turn
    # The last strip may have fewer tiles than the others.
    if KEPT and own >= V.rows:
        return
    kv_head = head_number // F.group
    P = Inputs(
        Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
        MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX,
    )  # fmt: skip
    head = of_head(P, batch, head_number, F)
    visited = visit(TABLE, TILES, batch, own, V)
    queries = of_queries(P, batch, own * Q_TILE, F, Q_TILE, False)

    Q_RAGGED: tl.constexpr = F.q_length % Q_TILE != 0
    DIM_RAGGED: tl.constexpr = F.head_dim != DIM
    VALUE_RAGGED: tl.constexpr = F.value_dim != VALUE_DIM
    line = own * Q_TILE + tl.arange(0, Q_TILE)
    rows = line[:, None]
    dims = tl.arange(0, DIM)[None, :]
    value_dims = tl.arange(0, VALUE_DIM)[None, :]
    wide_batch = batch.to(tl.int64)
    first = wide_batch * F.q_length * F.heads + head_number
    q_at = first * F.head_dim + moved(rows, F.heads * F.head_dim, F.wide) + dims
    all_q, all_dout = fit(Q, DOUT, MENDED_Q, MENDED_DOUT, FOUND, MENDED)
    q = vectors(all_q + q_at, rows, dims, F.q_length, F.head_dim, Q_RAGGED, DIM_RAGGED)
    if HELD:
        q = held(q, DIM)
    dout_at = first * F.value_dim + moved(rows, F.heads * F.value_dim, F.wide) + value_dims
    dout = vectors(all_dout + dout_at, rows, value_dims, F.q_length, F.value_dim, Q_RAGGED, VALUE_RAGGED)
    row_at = (wide_batch * F.heads + head_number) * F.q_length + line
    lse, delta = row_facts(LSE, DELTA, row_at, line, F, Q_RAGGED, False)

    columns = in_columns(F, KV_TILE, False)[:, None]
    all_k, all_v = sources(KV, OWN_K, OWN_V, FOUND, F)
    first_key = wide_batch * F.kv_batch + kv_head * F.kv_head
    k_pointers = all_k + first_key + (columns * F.kv_token + dims)
    v_pointers = all_v + first_key + (columns * F.kv_token + value_dims)
    kept_at = 0
    if KEPT:
        row_of_tiles = ((batch * F.heads + head_number) * S.rows + own - first_own) * S.columns
        kept_at = DS + row_of_tiles.to(tl.int64) * (Q_TILE * KV_TILE)
    bits_at = 0
    if BITS_KEPT:
        bits_at = KEPT_BITS + ((wide_batch * F.heads + head_number) * F.kept_head + own * (Q_TILE * 4))
    dq = tl.zeros([Q_TILE, DIM], tl.float32)
    dslope = tl.zeros([Q_TILE], tl.float32)
    ahead = full_tile(visited, visited.full_from, V)
    for step in tl.range(visited.full_from, visited.full_to):
        tile = full_tile(visited, step, V) if V.run else ahead
        ahead = full_tile(visited, step + 1, V)
        dq, dslope = _added(
            dq, dslope, q, dout, lse, delta, k_pointers, v_pointers, kept_at, bits_at, tile, queries,
            head, P, batch, F, Q_TILE, KV_TILE, DIM, VALUE_DIM, KEPT, BITS_KEPT, False,
        )  # fmt: skip
    ahead = masked_tile(visited, 0, V)
    for step in tl.range(0, visited.masked):
        tile = masked_tile(visited, step, V) if not V.listed else ahead
        ahead = masked_tile(visited, step + 1, V)
        dq, dslope = _added(
            dq, dslope, q, dout, lse, delta, k_pointers, v_pointers, kept_at, bits_at, tile, queries,
            head, P, batch, F, Q_TILE, KV_TILE, DIM, VALUE_DIM, KEPT, BITS_KEPT, True,
        )  # fmt: skip

    dq = dq * F.scale
    if not FRESH:
        dq += vectors(DQ_BEFORE + q_at, rows, dims, F.q_length, F.head_dim, Q_RAGGED, DIM_RAGGED)
    if Q_RAGGED or DIM_RAGGED:
        tl.store(DQ + q_at, dq, mask=(rows < F.q_length) & (dims < F.head_dim))
    else:
        tl.store(DQ + q_at, dq)
    if F.slopes:
        tl.store(DSLOPES + row_at, dslope, mask=line < F.q_length)


@triton.jit
def _added(
    dq, dslope, q, dout, lse, delta, k_pointers, v_pointers, kept_at, bits_at, tile, queries, head, P, batch,
    F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEPT: tl.constexpr, BITS_KEPT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a tile of keys adds."""
    KV_RAGGED: tl.constexpr = MASKED and F.kv_length % KV_TILE != 0
    start = tile * KV_TILE
    columns = (start + in_columns(F, KV_TILE, False))[:, None]
    dims = tl.arange(0, DIM)[None, :]
    value_dims = tl.arange(0, VALUE_DIM)[None, :]
    keys = of_keys(P, batch, start, F, KV_TILE, False)
    bias = biases(queries, keys, head, F)
    keep = 0
    if F.dropout:
        keep = weights(queries, keys, head, F.keep_weight, F, Q_TILE, KV_TILE)
    at = moved(start, F.kv_token, F.wide)
    k = vectors(k_pointers + at, columns, dims, F.kv_length, F.head_dim, KV_RAGGED, F.head_dim != DIM)
    bend = bent(tl.dot(q, tl.trans(k), input_precision=F.precision), F)
    v = vectors(v_pointers + at, columns, value_dims, F.kv_length, F.value_dim, KV_RAGGED, F.value_dim != VALUE_DIM)
    dp = tl.dot(dout, tl.trans(v), input_precision=F.precision)
    if BITS_KEPT:
        keep_bits(bits_at + moved(tile, KV_TILE // 32 * F.kept_line, F.wide_scores), keep, dp, F, Q_TILE, KV_TILE)
    _, ds, dproduct = derivatives(bend, dp, lse, delta, bias, keep, queries, keys, head, F, MASKED, False, KV_RAGGED)
    if F.slopes:
        dslope -= tl.sum(ds * distance(queries, keys), 1)
    if KEPT:
        keep_tile(kept_at + moved(tile, Q_TILE * KV_TILE, F.wide_scores), ds, in_columns(F, KV_TILE, False), F)
    dq = tl.dot(dproduct.to(k.dtype), k, dq, input_precision=F.precision)
    return dq, dslope
