# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""How the gradients of a tile of keys and values are computed: all queries that see them pass by.

Scores are held with keys as rows, so that both results are products with the scores on the left as they are.
"""

import triton
import triton.language as tl

from .derivatives import derivatives, row_facts
from .dropout import weights_by_keys, weights_from_bits
from .packing import sources
from .rows import fit
from .scores import Inputs, bent, biases, in_columns, of_head, of_keys, of_queries
from .tiles import full_tile, held, masked_tile, moved, owned, vectors, visit


@triton.jit
def backward_keys(
    Q, KV, Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
    MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX, OWN_K, OWN_V, FOUND,
    TABLE, TILES, DOUT, LSE, DELTA, MENDED_Q, MENDED_DOUT, KEPT_BITS, DK, DV,
    F: tl.constexpr, V: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, HELD: tl.constexpr, MENDED: tl.constexpr,
):  # fmt: skip
    """One program for each tile of keys of each key head; first those which most see under a causal mask.

    `MENDED` says that there are queries and cotangents to read if those that came are not fit.
    """
    own, batch, kv_head = owned(tl.program_id(0), V, F.kv_heads)
    P = Inputs(
        Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
        MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX,
    )  # fmt: skip
    visited = visit(TABLE, TILES, batch, own, V)
    keys = of_keys(P, batch, own * KV_TILE, F, KV_TILE, True)

    KV_RAGGED: tl.constexpr = F.kv_length % KV_TILE != 0
    DIM_RAGGED: tl.constexpr = F.head_dim != DIM
    VALUE_RAGGED: tl.constexpr = F.value_dim != VALUE_DIM
    columns = (own * KV_TILE + in_columns(F, KV_TILE, True))[:, None]
    dims = tl.arange(0, DIM)[None, :]
    value_dims = tl.arange(0, VALUE_DIM)[None, :]
    wide_batch = batch.to(tl.int64)
    all_k, all_v = sources(KV, OWN_K, OWN_V, FOUND, F)
    first_key = wide_batch * F.kv_batch + kv_head * F.kv_head
    at = moved(columns, F.kv_token, F.wide)
    k = vectors(all_k + first_key + (at + dims), columns, dims, F.kv_length, F.head_dim, KV_RAGGED, DIM_RAGGED)
    if HELD:
        k = held(k, DIM)
    v_pointers = all_v + first_key + (at + value_dims)
    v = vectors(v_pointers, columns, value_dims, F.kv_length, F.value_dim, KV_RAGGED, VALUE_RAGGED)

    all_q, all_dout = fit(Q, DOUT, MENDED_Q, MENDED_DOUT, FOUND, MENDED)
    rows = tl.arange(0, Q_TILE)[:, None]
    dk = tl.zeros([KV_TILE, DIM], tl.float32)
    dv = tl.zeros([KV_TILE, VALUE_DIM], tl.float32)
    for member in range(F.group):
        head_number = kv_head * F.group + member
        head = of_head(P, batch, head_number, F)
        first = wide_batch * F.q_length * F.heads + head_number
        q_pointers = all_q + first * F.head_dim + (rows * (F.heads * F.head_dim) + dims)
        dout_pointers = all_dout + first * F.value_dim + (rows * (F.heads * F.value_dim) + value_dims)
        row_at = (wide_batch * F.heads + head_number) * F.q_length
        kept_pointers = 0
        if F.dropout and not F.drawn:
            of_keys_here = moved(own, KV_TILE // 32 * F.kept_line, F.wide_scores)
            kept_pointers = KEPT_BITS + ((wide_batch * F.heads + head_number) * F.kept_head + of_keys_here)
        ahead = full_tile(visited, visited.full_from, V)
        for step in tl.range(visited.full_from, visited.full_to):
            tile = full_tile(visited, step, V) if V.run else ahead
            ahead = full_tile(visited, step + 1, V)
            dk, dv = _added(
                dk, dv, k, v, q_pointers, dout_pointers, LSE + row_at, DELTA + row_at, kept_pointers, tile, keys, head,
                P, batch, F, Q_TILE, KV_TILE, DIM, VALUE_DIM, False,
            )  # fmt: skip
        ahead = masked_tile(visited, 0, V)
        for step in tl.range(0, visited.masked):
            tile = masked_tile(visited, step, V) if not V.listed else ahead
            ahead = masked_tile(visited, step + 1, V)
            dk, dv = _added(
                dk, dv, k, v, q_pointers, dout_pointers, LSE + row_at, DELTA + row_at, kept_pointers, tile, keys, head,
                P, batch, F, Q_TILE, KV_TILE, DIM, VALUE_DIM, True,
            )  # fmt: skip

    token = wide_batch * F.kv_length * F.kv_heads + kv_head
    dk_at = token * F.head_dim + moved(columns, F.kv_heads * F.head_dim, F.wide) + dims
    dv_at = token * F.value_dim + moved(columns, F.kv_heads * F.value_dim, F.wide) + value_dims
    inside = columns < F.kv_length
    if KV_RAGGED or DIM_RAGGED:
        tl.store(DK + dk_at, dk * F.scale, mask=inside & (dims < F.head_dim))
    else:
        tl.store(DK + dk_at, dk * F.scale)
    if KV_RAGGED or VALUE_RAGGED:
        tl.store(DV + dv_at, dv, mask=inside & (value_dims < F.value_dim))
    else:
        tl.store(DV + dv_at, dv)


@triton.jit
def _added(
    dk, dv, k, v, q_pointers, dout_pointers, LSE, DELTA, kept_pointers, tile, keys, head, P, batch,
    F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """What a tile of queries adds. Its last rows may lie past the end: they weigh nothing, as their lse says."""
    Q_RAGGED: tl.constexpr = MASKED and F.q_length % Q_TILE != 0
    start = tile * Q_TILE
    rows = start + tl.arange(0, Q_TILE)
    dims = tl.arange(0, DIM)[None, :]
    value_dims = tl.arange(0, VALUE_DIM)[None, :]
    queries = of_queries(P, batch, start, F, Q_TILE, True)
    bias = biases(queries, keys, head, F)
    keep = 0
    if F.drawn:
        keep = weights_by_keys(queries, keys, head, F, Q_TILE, KV_TILE)
    elif F.dropout:
        keep = weights_from_bits(kept_pointers + start * 4, F, Q_TILE, KV_TILE)
    q_to = moved(start, F.heads * F.head_dim, F.wide)
    q = vectors(q_pointers + q_to, rows[:, None], dims, F.q_length, F.head_dim, Q_RAGGED, F.head_dim != DIM)
    bend = bent(tl.dot(k, tl.trans(q), input_precision=F.precision), F)
    dout_to = moved(start, F.heads * F.value_dim, F.wide)
    dout = vectors(
        dout_pointers + dout_to, rows[:, None], value_dims, F.q_length, F.value_dim, Q_RAGGED, F.value_dim != VALUE_DIM
    )
    dp = tl.dot(v, tl.trans(dout), input_precision=F.precision)
    lse, delta = row_facts(LSE, DELTA, rows, rows, F, Q_RAGGED, True)
    dropped, _, dproduct = derivatives(bend, dp, lse, delta, bias, keep, queries, keys, head, F, MASKED, False, False)
    dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=F.precision)
    dk = tl.dot(dproduct.to(q.dtype), q, dk, input_precision=F.precision)
    return dk, dv
