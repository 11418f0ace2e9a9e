# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass in one kernel for Hopper: dk and dv are summed in registers, dq in global memory.

Programs take turns. A turn owns 128 keys of one key head, 64 for each consumer, a group of four warps
(`backward_products`). One more warp fetches the query tiles that see these keys, and two warps add dq to memory
(`backward_transfers`). For heads of more than 128 dimensions a turn owns 64 keys, and the consumers share the work in
another way (`backward_wide_products`).

Words that a reader of Triton knows by other names: a *turn* is a work tile of a persistent program; a *place* is a
stage of a pipeline's buffer; the *fetching warp* is the producer; the *writers* are two more consumers, of dq. A *step*
is one query tile of a turn. `F`, `T` and `PLAN` are constants of the launch: `kernel_inputs.BlockConstants`,
`visited_tiles.TableShape` and `plans.BackwardPlan`. `P` holds pointers (`kernels.tokens.Inputs`).

All barriers of a program. The first five lie in shared memory, and TMA or single warps arrive; the others are hardware
barriers, and their numbers of threads count both who arrives and who waits:

| barrier | of each | who arrives | who waits | says |
|---|---|---|---|---|
| q_full | place of queries | TMA | consumers | queries, lse, numbers and bias of a step, and a turn's keys, are there |
| dout_full | place of dout | TMA | consumers | dout and -delta of a step, and a turn's values, are there |
| turn_full | place of turns | fetching warp | consumers, writers | the numbers of the next turn can be read |
| turn_empty | place of turns | consumers, writers | fetching warp | they have read these numbers |
| kv_empty (wide) | - | consumers | fetching warp | they are done with the turn's keys and values |
| q_empty | place of queries | consumers, 256 | fetching warp, 32 | they are done with the place |
| dout_empty | place of dout | consumers, 256 | fetching warp, 32 | they are done with the place |
| ds_full | - | consumers, 256 | the same | ds is written by both consumers; if wide, by that of dk |
| dq_full | consumer, writer | consumer, 128 | writer, 32 | the consumer's places of dq are for this writer to add |
| dq_empty | consumer | a writer, 32 | consumer, 128 | TMA has read the consumer's places of dq |
| weights_full (wide) | - | consumer of dv, 128 | consumer of dk, 128 | the softmax weights are in shared memory |
| weights_empty (wide) | - | consumer of dk, 128 | consumer of dv, 128 | their place, where ds lay, may be overwritten |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .backward_memory import allocate, plain_layout
from .backward_products import compute_gradients
from .backward_transfers import BackwardTiles, add_dq, by_batch, fetch_tiles
from .backward_turns import Turns
from .backward_wide_products import compute_dk, compute_dv
from .bias_tiles import tiles_of_bias
from .head_tiles import tiles_of_heads, tiles_of_results


@gluon.jit
def backward(
    Q, K, V, P,
    BOUNDS, TILES, DOUT, LSE_AND_DELTA, OF_QUERIES, RANKS, COUNTERS_BEFORE, DQ_BEFORE, DK_BEFORE, DV_BEFORE,
    FIRST_TILE, DK, DV, DHEADS_OR_DS, COUNTERS, DQ,
    F: gl.constexpr, T: gl.constexpr, BATCH: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Writes dk and dv and adds up dq, by one persistent program for each multiprocessor.

    A turn is one tile of keys of one key head; programs take turns from a counter. `LSE_AND_DELTA` and `OF_QUERIES`
    are the results of `backward._rows`. `RANKS` says in which order turns add to a tile of dq. `DQ` is
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
    Q_ROWS: gl.constexpr = BATCH * F.q_length
    KV_ROWS: gl.constexpr = BATCH * F.kv_length
    PADDED: gl.constexpr = Q_TILES * Q_TILE
    PLAIN: gl.constexpr = plain_layout()
    values = V + F.v_start
    if F.stacked:
        DV = DK + F.v_start
    lse = _tiles_of_numbers(LSE_AND_DELTA, BATCH * F.heads, PADDED, PLAN)
    minus_delta = LSE_AND_DELTA + BATCH * F.heads * PADDED * (8 if PLAN.subtracting else 1)
    of_queries = lse
    KINDS: gl.constexpr = len(PLAN.of_queries)
    if KINDS > 0:
        GROUPS: gl.constexpr = (BATCH if by_batch(F) else 1) * (F.heads if F.ranges_by_head else 1)
        of_queries = tma.make_tensor_descriptor(OF_QUERIES, [GROUPS * KINDS, PADDED], [PADDED, 1], [1, Q_TILE], PLAIN)
    DQ_ROWS: gl.constexpr = BATCH * F.heads * Q_TILES * PLAN.pieces(F.head_dim) * 16
    dq = tma.make_tensor_descriptor(DQ, [DQ_ROWS, 256], [256, 1], [16, 256], PLAIN)
    bias = 0
    if F.bias:
        bias = tiles_of_bias(P.bias, BATCH, F, Q_TILE, KV_TILE)
    ds = 0
    if PLAN.strip_rows:
        DS_ROWS: gl.constexpr = BATCH * F.heads * PLAN.strip_rows * Q_TILES * KV_TILE
        DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KV_TILE, Q_TILE], TYPE)
        ds = tma.make_tensor_descriptor(DHEADS_OR_DS, [DS_ROWS, Q_TILE], [Q_TILE, 1], [KV_TILE, Q_TILE], DS_LAYOUT)
    tiles = BackwardTiles(
        k=tiles_of_heads(K, F.kv_heads, KV_ROWS, F.head_dim, F.k_head, F.k_token, KV_TILE),
        v=tiles_of_heads(values, F.kv_heads, KV_ROWS, F.value_dim, F.v_head, F.v_token, KV_TILE),
        q=tiles_of_heads(Q, F.heads, Q_ROWS, F.head_dim, F.head_dim, F.heads * F.head_dim, Q_TILE),
        dout=tiles_of_heads(DOUT, F.heads, Q_ROWS, F.value_dim, F.value_dim, F.heads * F.value_dim, Q_TILE),
        lse=lse,
        delta=_tiles_of_numbers(minus_delta, BATCH * F.heads, PADDED, PLAN),
        of_queries=of_queries,
        dq=dq,
        dk=tiles_of_results(DK, BATCH, F.kv_length, F.kv_heads, F.head_dim) if PLAN.results_by_tma else dq,
        dv=tiles_of_results(DV, BATCH, F.kv_length, F.kv_heads, F.value_dim) if PLAN.results_by_tma else dq,
        bias=bias,
        ds=ds,
    )
    turns = Turns(BOUNDS, TILES, RANKS, COUNTERS, T.rows * BATCH * F.kv_heads, FIRST_TILE)
    shared = allocate(TYPE, F, PLAN)
    if PLAN.wide:
        gl.warp_specialize(
            [
                (compute_dv, (shared, P, DV, turns, F, T, PLAN)),
                (compute_dk, (shared, DK, turns, F, T, PLAN)),
                (fetch_tiles, (shared, tiles, turns, F, T, PLAN)),
                (add_dq, (0, shared, tiles, turns, F, T, PLAN)),
                (add_dq, (1, shared, tiles, turns, F, T, PLAN)),
            ],
            [4, 1, 1, 1],
            [PLAN.registers, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (compute_gradients, (0, shared, P, DK, DV, DHEADS_OR_DS, turns, F, T, PLAN)),
                (compute_gradients, (1, shared, P, DK, DV, DHEADS_OR_DS, turns, F, T, PLAN)),
                (fetch_tiles, (shared, tiles, turns, F, T, PLAN)),
                (add_dq, (0, shared, tiles, turns, F, T, PLAN)),
                (add_dq, (1, shared, tiles, turns, F, T, PLAN)),
            ],
            [4, 1, 1, 1],
            [PLAN.registers, 24, 24, 24],
        )


@gluon.jit
def _tiles_of_numbers(NUMBERS, HEADS: gl.constexpr, PADDED: gl.constexpr, PLAN: gl.constexpr):
    """The descriptor of tiles of lse or -delta.

    If `PLAN.subtracting`, a tile has 16 numbers to a query: 8 from memory, and 8 zeros, which TMA fills in.
    """
    if PLAN.subtracting:
        PARTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PLAN.q_tile, 16], NUMBERS.dtype.element_ty)
        return tma.make_tensor_descriptor(NUMBERS, [HEADS * PADDED, 8], [8, 1], [PLAN.q_tile, 16], PARTS)
    else:
        return tma.make_tensor_descriptor(NUMBERS, [HEADS, PADDED], [PADDED, 1], [1, PLAN.q_tile], plain_layout())
