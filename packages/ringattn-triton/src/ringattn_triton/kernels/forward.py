# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""How the output of a tile of queries is computed: an online softmax that continues from a partial result."""

import triton
import triton.language as tl

from .dropout import weights
from .packing import sources
from .scores import LOG2_E, Inputs, bent, biases, in_columns, of_head, of_keys, of_queries, scored, visible
from .tiles import full_tile, held, masked_tile, moved, owned, vectors, visit


@triton.jit
def forward(
    Q, KV, Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
    MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX, OWN_K, OWN_V, FOUND,
    TABLE, TILES, OUT_BEFORE, LSE_BEFORE, OUT, LSE, REST,
    F: tl.constexpr, V: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, HELD: tl.constexpr, FRESH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program for each tile of queries of each head; the last tiles, which see most under a causal mask, first.

    `FRESH` says that there is no result before, and nothing of it is read. What is no finite number in a query is NaN,
    and so are then all its scores: the result, too, if it sees anything. With a bias such a query is zero, and its
    result becomes NaN at the end: in scores that are NaN nothing would tell which keys a bias of -inf hides. `REST` is
    what rounding takes from `OUT`, if that is `SPLIT`.
    """
    turn, batch, head_number = owned(tl.program_id(0), V, F.heads)
    own = V.rows - 1 - turn
    kv_head = head_number // F.group
    P = Inputs(
        Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
        MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX,
    )  # fmt: skip
    head = of_head(P, batch, head_number, F)
    visited = visit(TABLE, TILES, batch, own, V)
    queries = of_queries(P, batch, own * Q_TILE, F, Q_TILE, False)

    rows = own * Q_TILE + tl.arange(0, Q_TILE)
    dims = tl.arange(0, DIM)
    value_dims = tl.arange(0, VALUE_DIM)
    wide_batch = batch.to(tl.int64)
    Q_RAGGED: tl.constexpr = F.q_length % Q_TILE != 0
    DIM_RAGGED: tl.constexpr = F.head_dim != DIM
    VALUE_RAGGED: tl.constexpr = F.value_dim != VALUE_DIM
    q_at = (wide_batch * F.q_length * F.heads + head_number) * F.head_dim
    q_row = moved(rows, F.heads * F.head_dim, F.wide)[:, None]
    q = vectors(
        Q + q_at + q_row + dims[None, :], rows[:, None], dims[None, :], F.q_length, F.head_dim, Q_RAGGED, DIM_RAGGED
    )
    good = tl.abs(q.to(tl.float32)) < float("inf")
    bad = 0
    if F.bias:
        bad = tl.max(tl.where(good, 0, 1), 1)
        q = tl.where(bad[:, None] == 0, q, 0.0).to(q.dtype)
    else:
        q = tl.where(good, q, float("nan")).to(q.dtype)
    if HELD:
        q = held(q, DIM)

    columns = in_columns(F, KV_TILE, False)
    all_k, all_v = sources(KV, OWN_K, OWN_V, FOUND, F)
    first_key = wide_batch * F.kv_batch + kv_head * F.kv_head
    k_pointers = all_k + first_key + (columns[None, :] * F.kv_token + dims[:, None])
    v_pointers = all_v + first_key + (columns[:, None] * F.kv_token + value_dims[None, :])

    lse_at = wide_batch * F.heads * F.q_length + head_number * F.q_length + rows
    out_at = (wide_batch * F.q_length * F.heads + head_number) * F.value_dim
    out_at = out_at + moved(rows, F.heads * F.value_dim, F.wide)[:, None] + value_dims[None, :]
    if FRESH:
        acc = tl.zeros([Q_TILE, VALUE_DIM], tl.float32)
        top = tl.full([Q_TILE], -float("inf"), tl.float32)
        total = tl.zeros([Q_TILE], tl.float32)
    else:
        before = tl.load(LSE_BEFORE + lse_at, mask=rows < F.q_length, other=-float("inf"))
        acc = vectors(
            OUT_BEFORE + out_at, rows[:, None], value_dims[None, :], F.q_length, F.value_dim, Q_RAGGED, VALUE_RAGGED
        )
        if F.dropout:
            acc = acc / F.keep_weight
        top = before * LOG2_E
        total = tl.where(before == -float("inf"), 0.0, 1.0)

    ahead = full_tile(visited, visited.full_from, V)
    for step in tl.range(visited.full_from, visited.full_to):
        tile = full_tile(visited, step, V) if V.run else ahead
        ahead = full_tile(visited, step + 1, V)
        acc, total, top = _continued(
            acc, total, top, q, k_pointers, v_pointers, tile, queries, head, P, batch,
            F, Q_TILE, KV_TILE, DIM, VALUE_DIM, False,
        )  # fmt: skip
    ahead = masked_tile(visited, 0, V)
    for step in tl.range(0, visited.masked):
        tile = masked_tile(visited, step, V) if not V.listed else ahead
        ahead = masked_tile(visited, step + 1, V)
        acc, total, top = _continued(
            acc, total, top, q, k_pointers, v_pointers, tile, queries, head, P, batch,
            F, Q_TILE, KV_TILE, DIM, VALUE_DIM, True,
        )  # fmt: skip

    nothing = total == 0.0
    share = tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, total))
    if F.dropout:
        share = share * F.keep_weight
    lse = tl.where(nothing, -float("inf"), (top + tl.log2(tl.where(nothing, 1.0, total))) / LOG2_E)
    if F.bias:
        lost = (bad != 0) & (nothing == 0)
        share = tl.where(lost, float("nan"), share)
        lse = tl.where(lost, float("nan"), lse)
    out = acc * share[:, None]
    given = out.to(OUT.dtype.element_ty)
    rest = (out - given.to(tl.float32)).to(given.dtype)
    if Q_RAGGED or VALUE_RAGGED:
        within = (rows < F.q_length)[:, None] & (value_dims < F.value_dim)[None, :]
        tl.store(OUT + out_at, given, mask=within)
        if SPLIT:
            tl.store(REST + out_at, rest, mask=within)
    else:
        tl.store(OUT + out_at, given)
        if SPLIT:
            tl.store(REST + out_at, rest)
    if Q_RAGGED:
        tl.store(LSE + lse_at, lse, mask=rows < F.q_length)
    else:
        tl.store(LSE + lse_at, lse)


@triton.jit
def _continued(
    acc, total, top, q, k_pointers, v_pointers, tile, queries, head, P, batch,
    F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: `acc` and `total` are sums relative to `exp2(top)`.

    What survives dropout weighs here what it weighs without: `F.keep_weight` comes last, and is never rounded to half
    precision, so that the output of a query that sees one key is as exact as that key's value.
    """
    KV_RAGGED: tl.constexpr = MASKED and F.kv_length % KV_TILE != 0
    start = tile * KV_TILE
    columns = start + in_columns(F, KV_TILE, False)
    dims = tl.arange(0, DIM)
    value_dims = tl.arange(0, VALUE_DIM)
    at = moved(tile, KV_TILE * F.kv_token, F.wide)
    k = vectors(k_pointers + at, columns[None, :], dims[:, None], F.kv_length, F.head_dim, KV_RAGGED, F.head_dim != DIM)
    keys = of_keys(P, batch, start, F, KV_TILE, False)
    bias = biases(queries, keys, head, F)
    if F.dropout:
        keep = weights(queries, keys, head, 1.0, F, Q_TILE, KV_TILE)
    s = scored(bent(tl.dot(q, k, input_precision=F.precision), F), bias, queries, keys, head, F)
    if MASKED:
        s = tl.where(visible(queries, keys, head, F, False, KV_RAGGED, True), s, -float("inf"))
    now = tl.maximum(top, tl.max(s, 1) * F.fold)
    base = now
    # A bias forbids by -inf, so that a row of a tile may see nothing though no mask says so.
    if MASKED or F.bias:
        base = tl.where(now == -float("inf"), 0.0, now)
    p = tl.exp2(s * F.fold - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    if F.dropout:
        p = p * keep
    v = vectors(
        v_pointers + at, columns[:, None], value_dims[None, :], F.kv_length, F.value_dim, KV_RAGGED,
        F.value_dim != VALUE_DIM,
    )  # fmt: skip
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=F.precision)
    return acc, total, now
