# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
"""How the output is computed on Hopper: `forward`'s online softmax by warpgroups that take turns with the tensor cores.

One warp, the producer, fetches tiles by TMA, several tiles ahead; groups of four warps, the consumers, have 64 queries
each. While a consumer takes exponentials of one tile its tensor cores multiply another tile's weights with values, and
the other consumers' tiles. Programs stay: each takes turns at tiles of queries from a common counter until none is
left, and fetches the first vectors of the next while the last results of this one are written. Two more warps may look
at keys and values meanwhile (`hopper_look`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..hopper import CONSUMED, FOUND_AT, TURNS_AT
from .hopper_look import LOOK_PLACES, LOOK_ROWS, LOOK_WIDTH, LOOKERS, look
from .hopper_pipeline import Shared, begin, got, next_turn, of_turn, produce
from .hopper_results import continues, outputs, written
from .packing import sources
from .scores import Inputs, bent, of_columns, of_head, of_rows, visible


@gluon.jit
def forward(
    Q, KV, Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
    MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX, OWN_K, OWN_V, FOUND,
    TABLE, TILES, OUT_BEFORE, LSE_BEFORE, REST_BEFORE, COUNTS_BEFORE, OUT, LSE, REST, COUNTS,
    F: gl.constexpr, V: gl.constexpr, BATCH: gl.constexpr, CONSUMERS: gl.constexpr, KV_TILE: gl.constexpr,
    STAGES: gl.constexpr, ORDERED: gl.constexpr, MASKED: gl.constexpr, FRESH: gl.constexpr, BOUNDED: gl.constexpr,
    SPLIT: gl.constexpr, REGISTERS: gl.constexpr, LOOKS: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """As many programs as the device has places. They count their turns in `COUNTS`.

    Where it `LOOKS` it reads K and V as they came, and counts what in them is no number. Where it runs `AGAIN` and
    there is a count of that, it writes all results once more, of K and V as they are packed by then; else it ends.
    `MASKED` says that there are tiles to mask at all, `BOUNDED` that no score needs a maximum taken from it before its
    exponential is, `SPLIT` that `REST` is to be what rounding takes from `OUT`; `REGISTERS` is how many a thread of a
    consumer may have.
    """
    if AGAIN and gl.load(COUNTS + FOUND_AT) == 0:
        return
    DIM: gl.constexpr = F.head_dim
    TYPE: gl.constexpr = Q.dtype.element_ty
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONSUMED, DIM], TYPE)
    COLUMNS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KV_TILE, DIM], TYPE)
    BIASES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONSUMED, KV_TILE], TYPE)
    Q_WIDTH: gl.constexpr = F.heads * DIM
    q_tiles = tma.make_tensor_descriptor(Q, [BATCH * F.q_length, Q_WIDTH], [Q_WIDTH, 1], [CONSUMED, DIM], ROWS)
    k, v = OWN_K, OWN_V
    if not LOOKS:
        k, v = sources(KV, OWN_K, OWN_V, FOUND, F)
    KV_ROWS: gl.constexpr = BATCH * F.kv_length
    k_tiles = tma.make_tensor_descriptor(k, [KV_ROWS, F.kv_token], [F.kv_token, 1], [KV_TILE, DIM], COLUMNS)
    v_tiles = tma.make_tensor_descriptor(v, [KV_ROWS, F.kv_token], [F.kv_token, 1], [KV_TILE, DIM], COLUMNS)
    bias_tiles = q_tiles
    if F.bias:
        # What all batch rows or heads share does not move with them, and there is one of it.
        BIAS_ROWS: gl.constexpr = (BATCH if F.bias_batch else 1) * (F.heads if F.bias_head else 1) * F.q_length
        bias_tiles = tma.make_tensor_descriptor(
            BIAS, [BIAS_ROWS, F.kv_length], [F.kv_length, 1], [CONSUMED, KV_TILE], BIASES
        )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    NUMBER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    # The next turn's queries come early, unless a bias has their place.
    Q_PLACES: gl.constexpr = 1 if F.bias else 2
    queries = gl.allocate_shared_memory(TYPE, [Q_PLACES * CONSUMERS, CONSUMED, DIM], ROWS)
    bias = queries
    if F.bias:
        bias = gl.allocate_shared_memory(TYPE, [STAGES * CONSUMERS, CONSUMED, KV_TILE], BIASES)
    shared = Shared(
        queries,
        gl.allocate_shared_memory(gl.int64, [Q_PLACES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [Q_PLACES, 1], BARRIER),
        gl.allocate_shared_memory(TYPE, [STAGES, KV_TILE, DIM], COLUMNS),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], NUMBER),
        bias,
        gl.allocate_shared_memory(TYPE, [STAGES, KV_TILE, DIM], COLUMNS),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int32, [2, 1], NUMBER),
        gl.allocate_shared_memory(gl.int32, [2, 1], NUMBER),
        gl.allocate_shared_memory(gl.int32, [2, 1], NUMBER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
    )
    begin(shared.q_full, Q_PLACES, 1)
    begin(shared.q_empty, Q_PLACES, CONSUMERS)
    begin(shared.k_full, STAGES, 1)
    begin(shared.k_empty, STAGES, CONSUMERS)
    begin(shared.v_full, STAGES, 1)
    begin(shared.v_empty, STAGES, CONSUMERS)
    begin(shared.turns_full, 2, 1)
    begin(shared.turns_empty, 2, CONSUMERS)
    begin(shared.order, CONSUMERS, 1)
    P = Inputs(
        Q_POSITIONS, KV_POSITIONS, Q_INDEX, KV_INDEX, KV_GROUPS, Q_SEGMENTS, KV_SEGMENTS, BIAS, SLOPES,
        MASK_WORDS, MASK_OF_HEAD, DENSE_WORDS, SEED, BATCH_INDEX, HEAD_INDEX,
    )  # fmt: skip
    S: gl.constexpr = (CONSUMERS, KV_TILE, STAGES, ORDERED, MASKED, FRESH, Q_PLACES, BOUNDED, SPLIT)
    all_turns = V.rows * BATCH * F.heads
    TAKEN = COUNTS + TURNS_AT + (1 if AGAIN else 0)
    LOOKED: gl.constexpr = KV_ROWS * F.kv_token if LOOKS else 0
    places = shared.k
    full = shared.k_full
    if LOOKS:
        PLACE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LOOK_ROWS, LOOK_WIDTH], TYPE)
        places = gl.allocate_shared_memory(TYPE, [LOOK_PLACES, LOOK_ROWS, LOOK_WIDTH], PLACE)
        full = gl.allocate_shared_memory(gl.int64, [LOOK_PLACES, 1], BARRIER)
        begin(full, LOOK_PLACES, 1)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, shared, P, OUT_BEFORE, LSE_BEFORE, OUT, LSE, REST, all_turns, F, V, S)),
                (_consume, (1, shared, P, OUT_BEFORE, LSE_BEFORE, OUT, LSE, REST, all_turns, F, V, S)),
                (produce, (shared, q_tiles, k_tiles, v_tiles, bias_tiles, TABLE, TILES, TAKEN, all_turns, F, V, S)),
                (look, (OWN_K, OWN_V, COUNTS, places, full, LOOKED)),
            ],
            [4, 1, LOOKERS],
            [REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, shared, P, OUT_BEFORE, LSE_BEFORE, OUT, LSE, REST, all_turns, F, V, S)),
                (_consume, (1, shared, P, OUT_BEFORE, LSE_BEFORE, OUT, LSE, REST, all_turns, F, V, S)),
                (_consume, (2, shared, P, OUT_BEFORE, LSE_BEFORE, OUT, LSE, REST, all_turns, F, V, S)),
                (produce, (shared, q_tiles, k_tiles, v_tiles, bias_tiles, TABLE, TILES, TAKEN, all_turns, F, V, S)),
                (look, (OWN_K, OWN_V, COUNTS, places, full, LOOKED)),
            ],
            [4, 4, 1, LOOKERS],
            [REGISTERS, REGISTERS, 24, 24],
        )


@gluon.jit
def _consume(
    NUMBER: gl.constexpr, shared, P, OUT_BEFORE, LSE_BEFORE, OUT, LSE, REST, all_turns,
    F: gl.constexpr, V: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """The results of every turn for 64 of its queries."""
    CONSUMERS: gl.constexpr = S[0]
    KV_TILE: gl.constexpr = S[1]
    STAGES: gl.constexpr = S[2]
    ORDERED: gl.constexpr = S[3]
    MASKED: gl.constexpr = S[4]
    FRESH: gl.constexpr = S[5]
    Q_PLACES: gl.constexpr = S[6]
    BOUNDED: gl.constexpr = S[7]
    DIM: gl.constexpr = F.head_dim
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    RAGGED: gl.constexpr = F.q_length % (CONSUMERS * CONSUMED) != 0
    nought = gl.zeros([CONSUMED, KV_TILE], gl.float32, SCORES)
    taken = 0
    ordered = 0
    done = 0
    acc = gl.zeros([CONSUMED, DIM], gl.float32, SUMS)
    top = gl.zeros([CONSUMED], gl.float32, OF_ROWS)
    total = top
    bad = gl.zeros([CONSUMED], gl.int32, OF_ROWS)
    weights = _as_operand(nought, shared.k.dtype, SUMS)
    turn = next_turn(shared, done)
    while turn < all_turns:
        own, batch, head_number = of_turn(turn, F, V)
        masked = got(shared.masked.index(done % 2))
        whole = got(shared.whole.index(done % 2))
        start = own * (CONSUMERS * CONSUMED) + NUMBER * CONSUMED
        # The scores of the first tile, and the weighted values of the last turn's last, are in flight together. Before
        # the first turn there are none: what is multiplied then is not looked at.
        queries_here = shared.q.index((done % Q_PLACES) * CONSUMERS + NUMBER)
        mbarrier.wait(shared.q_full.index(done % Q_PLACES), (done // Q_PLACES) & 1)
        old_bad = bad
        if F.bias:
            bad = _mended(queries_here, SUMS, OF_ROWS)
        mbarrier.wait(shared.k_full.index(taken % STAGES), (taken // STAGES) & 1)
        k = shared.k.index(taken % STAGES)
        s = warpgroup_mma(queries_here, k.permute((1, 0)), nought, use_acc=False, is_async=True)
        before = (taken + STAGES - 1) % STAGES
        if done > 0:
            mbarrier.wait(shared.v_full.index(before), ((taken - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, shared.v.index(before), acc, is_async=True)
        head = of_head(P, batch, head_number, F)
        queries = of_rows(P, batch, start + gl.arange(0, CONSUMED, OF_ROWS), F, RAGGED, False)
        keys = _keys(shared, taken, P, batch, F, MASKED, SCORES, KV_TILE, STAGES)
        bias = _bias(shared, taken, NUMBER, F, S, SCORES)
        if not F.bias:
            bad = _no_numbers(queries_here.load(SUMS), OF_ROWS)
        old_top, old_total = top, total
        top, total = continues(LSE_BEFORE, start, batch, head_number, F, S, OF_ROWS)
        kept = total
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(shared.k_empty.index(taken % STAGES), count=1)
        p, total, top, shrink = _softmax(s, bad, total, top, queries, keys, bias, head, F, MASKED, S)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if done > 0:
            mbarrier.arrive(shared.v_empty.index(before), count=1)
            written(acc, old_top, old_total, old_bad, shared, done - 1, NUMBER, OUT, LSE, REST, F, V, S, SUMS, OF_ROWS)
        acc = gl.zeros([CONSUMED, DIM], gl.float32, SUMS)
        if not FRESH:
            out_at, within = outputs(start, batch, head_number, F, SUMS)
            acc = gl.load(OUT_BEFORE + out_at, mask=within, other=0.0)
            acc = acc * gl.convert_layout(kept if BOUNDED else shrink, gl.SliceLayout(1, SUMS))[:, None]
            # Nothing is in flight: this keeps the multiplication from being done late, in the registers of a product.
            acc = warpgroup_mma_wait(0, deps=[acc])
        weights = _as_operand(p, queries_here.dtype, SUMS)
        taken += 1
        first = 1
        if MASKED:
            for _ in range(1, masked):
                acc, weights, total, top = _continued(
                    acc, weights, total, top, shared, queries_here, nought, taken, 0, NUMBER,
                    queries, bad, head, P, batch, F, True, S, SCORES, SUMS, False,
                )  # fmt: skip
                taken += 1
            first = gl.where(masked > 0, 0, 1)
        for _ in range(first, whole):
            acc, weights, total, top = _continued(
                acc, weights, total, top, shared, queries_here, nought, taken, ordered, NUMBER,
                queries, bad, head, P, batch, F, False, S, SCORES, SUMS, ORDERED,
            )  # fmt: skip
            taken += 1
            ordered += 1
        mbarrier.arrive(shared.q_empty.index(done % Q_PLACES), count=1)
        done += 1
        turn = next_turn(shared, done)
    if done > 0:
        last = taken - 1
        mbarrier.wait(shared.v_full.index(last % STAGES), (last // STAGES) & 1)
        acc = warpgroup_mma(weights, shared.v.index(last % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        written(acc, top, total, bad, shared, done - 1, NUMBER, OUT, LSE, REST, F, V, S, SUMS, OF_ROWS)


@gluon.jit
def _continued(
    acc, weights, total, top, shared, queries_here, nought, taken, ordered, NUMBER: gl.constexpr,
    queries, bad, head, P, batch, F: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr, SCORES: gl.constexpr,
    SUMS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """One step: the scores of this tile and the last tile's weighted values are in flight together."""
    CONSUMERS: gl.constexpr = S[0]
    KV_TILE: gl.constexpr = S[1]
    STAGES: gl.constexpr = S[2]
    BOUNDED: gl.constexpr = S[7]
    last = taken - 1
    mbarrier.wait(shared.k_full.index(taken % STAGES), (taken // STAGES) & 1)
    if ORDERED:
        mbarrier.wait(shared.order.index(NUMBER), (ordered + (1 if NUMBER == 0 else 0)) & 1)
    k = shared.k.index(taken % STAGES)
    s = warpgroup_mma(queries_here, k.permute((1, 0)), nought, use_acc=False, is_async=True)
    mbarrier.wait(shared.v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(weights, shared.v.index(last % STAGES), acc, is_async=True)
    if ORDERED:
        mbarrier.arrive(shared.order.index((NUMBER + 1) % CONSUMERS), count=1)
    keys = _keys(shared, taken, P, batch, F, MASKED, SCORES, KV_TILE, STAGES)
    bias = _bias(shared, taken, NUMBER, F, S, SCORES)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(shared.k_empty.index(taken % STAGES), count=1)
    p, total, top, shrink = _softmax(s, bad, total, top, queries, keys, bias, head, F, MASKED, S)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(shared.v_empty.index(last % STAGES), count=1)
    if not BOUNDED:
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    return acc, _as_operand(p, queries_here.dtype, SUMS), total, top


@gluon.jit
def _as_operand(p, TYPE: gl.constexpr, SUMS: gl.constexpr):
    """The weights in the registers from which a product takes its left side."""
    return gl.convert_layout(p.to(TYPE), gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2))


@gluon.jit
def _no_numbers(queries, LAYOUT: gl.constexpr):
    """Which queries hold anything that is no finite number: nothing times that is zero."""
    nothing = gl.sum(queries.to(gl.float32) * 0.0, 1)
    return gl.convert_layout(gl.where(nothing == 0.0, 0, 1), LAYOUT)


@gluon.jit
def _mended(place, SUMS: gl.constexpr, OF_ROWS: gl.constexpr):
    """The same of the queries in a place, where those are zero from then on."""
    queries = place.load(SUMS)
    bad = _no_numbers(queries, gl.SliceLayout(1, SUMS))
    if gl.max(bad, 0) != 0:
        place.store(gl.where(bad[:, None] != 0, 0.0, queries).to(place.dtype))
        fence_async_shared()
    return gl.convert_layout(bad, OF_ROWS)


@gluon.jit
def _keys(
    shared, taken, P, batch, F: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, KV_TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The keys of a tile to mask."""
    if MASKED:
        start = got(shared.tiles.index(taken % STAGES)) * KV_TILE
        columns = gl.arange(0, KV_TILE, gl.SliceLayout(0, SCORES))
        return of_columns(P, batch, start, columns, F, KV_TILE, False)
    else:
        return 0


@gluon.jit
def _bias(shared, taken, NUMBER: gl.constexpr, F: gl.constexpr, S: gl.constexpr, SCORES: gl.constexpr):
    """The bias of a tile of scores."""
    if F.bias:
        return shared.bias.index((taken % S[2]) * S[0] + NUMBER).load(SCORES)
    else:
        return 0


@gluon.jit
def _softmax(s, bad, total, top, queries, keys, bias, head, F: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr):
    """The weights of a tile of products, sums and maxima that count it in, and what the sums so far shrink by.

    Where nothing is masked, bent or added, infinite products make NaN by themselves of a query that is no number.
    Where scores are `BOUNDED` half of the bound stands for all maxima, and nothing shrinks.
    """
    KV_TILE: gl.constexpr = S[1]
    BOUNDED: gl.constexpr = S[7]
    RAGGED: gl.constexpr = MASKED and F.kv_length % KV_TILE != 0
    if F.capped:
        s = bent(s, F)
    if F.bias:
        s = s * F.unbend + bias.to(gl.float32)
    if MASKED:
        if not F.bias:
            s = gl.where(bad[:, None] != 0, float("nan"), s)
        s = gl.where(visible(queries, keys, head, F, False, RAGGED, False), s, -float("inf"))
    if BOUNDED:
        p = gl.exp2(s * F.fold - top[:, None])
        if not MASKED:
            total = gl.where(bad != 0, float("nan"), total)
        return p, total + gl.sum(p, 1), top, top
    else:
        now = gl.maximum(top, gl.max(s, 1) * F.fold)
        if F.capped and not MASKED:
            now = gl.where(bad != 0, float("nan"), now)
        base = now
        if MASKED or F.bias:
            base = gl.where(now == -float("inf"), 0.0, now)
        p = gl.exp2(s * F.fold - base[:, None])
        shrink = gl.exp2(top - base)
        return p, total * shrink + gl.sum(p, 1), now, shrink
