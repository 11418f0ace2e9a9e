# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""How the gradient of a tile of the bias is computed: summed over all heads, batch rows and queries that share it.

Each program owns what it sums, so the order of the sum is fixed.
"""

import triton
import triton.language as tl

from .derivatives import derivatives, row_facts
from .dropout import weights
from .packing import sources
from .scores import Inputs, bent, biases, in_columns, of_head, of_keys, of_queries
from .tiles import moved, vectors


@triton.jit
def backward_bias(
    Q, KV, Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
    MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX, OWN_K, OWN_V, FOUND,
    SEEN, DOUT, LSE, DELTA, DBIAS,
    F: tl.constexpr, D: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """One program for each tile of `DBIAS [b, n, t, S]`; `SEEN [g, rows, columns]` says which tiles are visible.

    `D` is `backward.BiasSums`.
    """
    program = tl.program_id(0)
    kv_tile = program % D.columns
    rest = program // D.columns
    own = rest % D.own_rows
    of_bias = rest // D.own_rows
    bias_head = of_bias % D.heads
    bias_batch = of_bias // D.heads
    P = Inputs(
        Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
        MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX,
    )  # fmt: skip
    all_k, all_v = sources(KV, OWN_K, OWN_V, FOUND, F)
    total = tl.zeros([Q_TILE, KV_TILE], tl.float32)
    for turn in range(D.batch_sums * D.row_sums):
        row_tile = own + turn % D.row_sums
        batch = bias_batch + turn // D.row_sums
        group = batch
        if not D.grouped:
            group = batch * 0
        if tl.load(SEEN + ((group * D.rows + row_tile) * D.columns + kv_tile)) != 0:
            # Heads whose gradients are summed share their bias.
            queries = of_queries(P, batch, row_tile * Q_TILE, F, Q_TILE, False)
            keys = of_keys(P, batch, kv_tile * KV_TILE, F, KV_TILE, False)
            bias = biases(queries, keys, of_head(P, batch, bias_head, F), F)
            for member in tl.range(0, D.head_sums):
                total += _of_head(
                    Q, all_k, all_v, DOUT, LSE, DELTA, P, batch, bias_head + member, row_tile, kv_tile, queries, keys,
                    bias, F, Q_TILE, KV_TILE, DIM, VALUE_DIM,
                )  # fmt: skip

    columns = kv_tile * KV_TILE + in_columns(F, KV_TILE, False)
    line = of_bias.to(tl.int64)
    if D.summed_rows:
        tl.store(DBIAS + (line * F.kv_length + columns), tl.sum(total, 0), mask=columns < F.kv_length)
    else:
        rows = own * Q_TILE + tl.arange(0, Q_TILE)
        at = (line * F.q_length + rows.to(tl.int64)[:, None]) * F.kv_length + columns[None, :]
        tl.store(DBIAS + at, total, mask=(rows < F.q_length)[:, None] & (columns < F.kv_length)[None, :])


@triton.jit
def _of_head(
    Q, all_k, all_v, DOUT, LSE, DELTA, P, batch, head_number, row_tile, kv_tile, queries, keys, bias,
    F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """The derivative by the scores of one tile of one head; zero past the ends."""
    Q_RAGGED: tl.constexpr = F.q_length % Q_TILE != 0
    KV_RAGGED: tl.constexpr = F.kv_length % KV_TILE != 0
    head = of_head(P, batch, head_number, F)
    keep = 0
    if F.dropout:
        keep = weights(queries, keys, head, F.keep_weight, F, Q_TILE, KV_TILE)
    line = row_tile * Q_TILE + tl.arange(0, Q_TILE)
    rows = line[:, None]
    columns = (kv_tile * KV_TILE + in_columns(F, KV_TILE, False))[:, None]
    dims = tl.arange(0, DIM)[None, :]
    value_dims = tl.arange(0, VALUE_DIM)[None, :]
    wide_batch = batch.to(tl.int64)
    first = wide_batch * F.q_length * F.heads + head_number
    q_at = first * F.head_dim + moved(rows, F.heads * F.head_dim, F.wide) + dims
    q = vectors(Q + q_at, rows, dims, F.q_length, F.head_dim, Q_RAGGED, F.head_dim != DIM)
    dout_at = first * F.value_dim + moved(rows, F.heads * F.value_dim, F.wide) + value_dims
    dout = vectors(DOUT + dout_at, rows, value_dims, F.q_length, F.value_dim, Q_RAGGED, F.value_dim != VALUE_DIM)
    first_key = wide_batch * F.kv_batch + head_number // F.group * F.kv_head
    at = moved(columns, F.kv_token, F.wide)
    k = vectors(all_k + first_key + (at + dims), columns, dims, F.kv_length, F.head_dim, KV_RAGGED, F.head_dim != DIM)
    v_pointers = all_v + first_key + (at + value_dims)
    v = vectors(v_pointers, columns, value_dims, F.kv_length, F.value_dim, KV_RAGGED, F.value_dim != VALUE_DIM)
    row_at = (wide_batch * F.heads + head_number) * F.q_length + line
    lse, delta = row_facts(LSE, DELTA, row_at, line, F, Q_RAGGED, False)
    bend = bent(tl.dot(q, tl.trans(k), input_precision=F.precision), F)
    dp = tl.dot(dout, tl.trans(v), input_precision=F.precision)
    _, ds = derivatives(bend, dp, lse, delta, bias, keep, queries, keys, head, F, True, False, KV_RAGGED)
    return ds
