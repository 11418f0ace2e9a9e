# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass in one kernel for Hopper: dk and dv are summed in registers, dq in global memory.

Programs take turns. A turn owns 128 keys of one key head, 64 for each of two consumers (`backward_products`). The
producer fetches the query tiles that see these keys, and two single warps, the writers, add dq to memory
(`backward_transfers`). For heads of more than 128 dimensions a turn owns 64 keys, and the consumers share the work in
another way (`backward_wide_products`).

All barriers of a program. The first five lie in shared memory. The others are hardware barriers, and their numbers of
threads count both who arrives and who waits:

| barrier | of each | who arrives | who waits | says |
|---|---|---|---|---|
| q_full | stage of queries | TMA | consumers | queries, their values and bias, and a turn's keys, are there |
| dout_full | stage of dout | TMA | consumers | dout and -delta of a step, and a turn's values, are there |
| turn_full | stage of turns | producer | consumers, writers | the numbers of the next turn can be read |
| turn_empty | stage of turns | consumers, writers | producer | they have read these numbers |
| kv_empty (wide) | - | consumers | producer | they are done with the turn's keys and values |
| q_empty | stage of queries | consumers, 256 | producer, 32 | they are done with the stage |
| dout_empty | stage of dout | consumers, 256 | producer, 32 | they are done with the stage |
| ds_full | - | consumers, 256 | the same; if wide, that of dv | ds is written by both; if wide, by that of dk |
| dq_full | consumer, writer | consumer, 128 | writer, 32 | the consumer's place of dq is for this writer to add |
| dq_empty | consumer | a writer, 32 | consumer, 128 | TMA has read the consumer's place of dq |
| weights_full (wide) | - | consumer of dv, 128 | consumer of dk, 128 | the softmax weights are in shared memory |
| weights_empty (wide) | - | consumer of dk, 128 | consumer of dv, 128 | their place, where ds lay, may be overwritten |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .backward_memory import allocate
from .backward_products import compute_gradients
from .backward_transfers import BackwardTiles, add_dq, by_batch, fetch_tiles
from .backward_turns import Turns
from .backward_wide_products import compute_dk, compute_dv
from .head_tiles import tiles_of_bias, tiles_of_heads, tiles_of_results
from .layouts import plain_layout
from .plans import SINGLE_WARP_REGISTERS


@gluon.jit
def backward(
    Q, K, V, P,
    BOUNDS, TILES, DOUT, LSE_AND_DELTA, QUERY_VALUES, RANKS, COUNTERS_BEFORE, DQ_BEFORE, DK_BEFORE, DV_BEFORE,
    FIRST_TILE, DK, DV, DHEADS_OR_DS, COUNTERS, DQ,
    F: gl.constexpr, T: gl.constexpr, BATCH: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Writes dk and dv and adds up dq, by one persistent program for each multiprocessor.

    A turn is one tile of keys of one key head; programs take turns from a counter. `LSE_AND_DELTA` and `QUERY_VALUES`
    are the results of `backward._values_of_queries`. `RANKS` says in which order turns add to a tile of dq. `DQ` is
    float32 in the order of `dq_order`, with the softmax scale only in float16. `X_BEFORE` is `X` itself, or `None`.
    Unless `PLAN.ordered`, `DQ` holds zeros at first. If `PLAN.ordered`, the first turn of a tile overwrites it, and the
    counter of a tile that no turn visits stays 0.

    `DHEADS_OR_DS` has parts of the gradient of ALiBi slopes, with the sign changed: a number for each head, part of its
    steps, key tile and consumer. In a launch for a strip of `PLAN.strip_rows` key tiles from number `FIRST_TILE` on
    (the last strip may have fewer), it is ds for the gradient of the bias instead, `[B, N, PLAN.strip_rows, Q_TILES,
    kv_tile, q_tile]`, with keys as rows. The other results of a strip continue those of the earlier strips.
    """
    TYPE: gl.constexpr = Q.dtype.element_ty
    Q_TILE: gl.constexpr = PLAN.q_tile
    KV_TILE: gl.constexpr = PLAN.kv_tile
    Q_TILES: gl.constexpr = T.columns
    PADDED: gl.constexpr = Q_TILES * Q_TILE
    PLAIN: gl.constexpr = plain_layout()
    values = V + F.v_start
    if F.stacked:
        DV = DK + F.v_start
    lse = _tiles_of_values(LSE_AND_DELTA, BATCH * F.heads, PADDED, PLAN)
    minus_delta = LSE_AND_DELTA + BATCH * F.heads * PADDED * (8 if PLAN.subtracting else 1)
    query_values = lse
    KINDS: gl.constexpr = len(PLAN.query_kinds)
    if KINDS > 0:
        LINES: gl.constexpr = (BATCH if by_batch(F) else 1) * (F.heads if F.ranges_by_head else 1) * KINDS
        query_values = tma.make_tensor_descriptor(QUERY_VALUES, [LINES, PADDED], [PADDED, 1], [1, Q_TILE], PLAIN)
    # A square of dq is 16 rows of 256 numbers.
    DQ_ROWS: gl.constexpr = BATCH * F.heads * Q_TILES * PLAN.squares(F.head_dim) * 16
    dq = tma.make_tensor_descriptor(DQ, [DQ_ROWS, 256], [256, 1], [16, 256], PLAIN)
    bias = tiles_of_bias(P.bias, BATCH, F, Q_TILE, KV_TILE) if F.bias else 0
    ds = 0
    if PLAN.strip_rows:
        DS_ROWS: gl.constexpr = BATCH * F.heads * PLAN.strip_rows * Q_TILES * KV_TILE
        DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KV_TILE, Q_TILE], TYPE)
        ds = tma.make_tensor_descriptor(DHEADS_OR_DS, [DS_ROWS, Q_TILE], [Q_TILE, 1], [KV_TILE, Q_TILE], DS_LAYOUT)
    Q_ROWS: gl.constexpr = BATCH * F.q_length
    KV_ROWS: gl.constexpr = BATCH * F.kv_length
    tiles = BackwardTiles(
        k=tiles_of_heads(K, F.kv_heads, KV_ROWS, F.head_dim, F.k_head, F.k_token, KV_TILE),
        v=tiles_of_heads(values, F.kv_heads, KV_ROWS, F.value_dim, F.v_head, F.v_token, KV_TILE),
        q=tiles_of_heads(Q, F.heads, Q_ROWS, F.head_dim, F.head_dim, F.heads * F.head_dim, Q_TILE),
        dout=tiles_of_heads(DOUT, F.heads, Q_ROWS, F.value_dim, F.value_dim, F.heads * F.value_dim, Q_TILE),
        lse=lse,
        delta=_tiles_of_values(minus_delta, BATCH * F.heads, PADDED, PLAN),
        query_values=query_values,
        dq=dq,
        dk=tiles_of_results(DK, BATCH, F.kv_length, F.kv_heads, F.head_dim) if PLAN.results_by_tma else dq,
        dv=tiles_of_results(DV, BATCH, F.kv_length, F.kv_heads, F.value_dim) if PLAN.results_by_tma else dq,
        bias=bias,
        ds=ds,
    )
    turns = Turns(BOUNDS, TILES, RANKS, COUNTERS, T.rows * BATCH * F.kv_heads, FIRST_TILE)
    shared = allocate(TYPE, F, PLAN)
    gl.warp_specialize(
        [
            (compute_dv, (shared, P, DV, turns, F, T, PLAN)),
            (compute_dk, (shared, DK, turns, F, T, PLAN)),
            (fetch_tiles, (shared, tiles, turns, F, T, PLAN)),
            (add_dq, (0, shared, tiles, turns, F, T, PLAN)),
            (add_dq, (1, shared, tiles, turns, F, T, PLAN)),
        ]
        if PLAN.wide
        else [
            (compute_gradients, (0, shared, P, DK, DV, DHEADS_OR_DS, turns, F, T, PLAN)),
            (compute_gradients, (1, shared, P, DK, DV, DHEADS_OR_DS, turns, F, T, PLAN)),
            (fetch_tiles, (shared, tiles, turns, F, T, PLAN)),
            (add_dq, (0, shared, tiles, turns, F, T, PLAN)),
            (add_dq, (1, shared, tiles, turns, F, T, PLAN)),
        ],
        [4, 1, 1, 1],
        [PLAN.registers] + [SINGLE_WARP_REGISTERS] * 3,
    )


@gluon.jit
def _tiles_of_values(VALUES, HEADS: gl.constexpr, PADDED: gl.constexpr, PLAN: gl.constexpr):
    """The descriptor of tiles of lse or -delta.

    If `PLAN.subtracting`, a tile has 16 numbers to a query: 8 from memory, and 8 zeros, which TMA fills in.
    """
    if PLAN.subtracting:
        SPLIT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PLAN.q_tile, 16], VALUES.dtype.element_ty)
        return tma.make_tensor_descriptor(VALUES, [HEADS * PADDED, 8], [8, 1], [PLAN.q_tile, 16], SPLIT)
    else:
        return tma.make_tensor_descriptor(VALUES, [HEADS, PADDED], [PADDED, 1], [1, PLAN.q_tile], plain_layout())
