# SPDX-License-Identifier: Apache-2.0
"""The forward kernel for Hopper: an online softmax by warpgroups that use the tensor cores in rotation.

One warp, the producer, fetches tiles by TMA, several tiles ahead. Groups of four warps, the consumers, compute 64
queries each. While a consumer takes the exponentials of one key tile, the tensor cores multiply the weights of its
previous key tile by the values, and compute for the other consumers. Programs are persistent: each takes query tiles
("turns") from a common counter until none is left, and fetches the first tiles of the next turn while it writes the
results of the last.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..kernels.scores import of_head
from ..kernels.tokens import Keys, of_columns, of_rows
from .dropout import counter_of_queries, draws
from .forward_positions import of_keys, of_queries
from .forward_results import continued_rows, load_sums, no_maxima, write_results
from .forward_softmax import as_quads, pack, quad_sums, score_tile, weigh_tile
from .forward_transfers import ForwardMemory, next_turn, produce, read
from .hardware_barriers import arrive_at, begin, read_number, sync_at, wait_until_full
from .head_tiles import in_two_pieces, product_layout, product_of_heads, row_layout, stage_of, stages_of_heads
from .plans import CONSUMER_ROWS
from .sums import accumulators, add_values, no_sums, rescale, wait_for_sums
from .workarounds import after_arrival, after_barriers, softmax_first


@gluon.jit
def forward(
    Q, K, V, P,
    BOUNDS, TILES, OUT_BEFORE, LSE_BEFORE, MAX_BEFORE, TAKEN_BEFORE, OUT, LSE, MAX, TAKEN,
    F: gl.constexpr, T: gl.constexpr, BATCH: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Writes `OUT`, `LSE` and, if `F.max_logits`, `MAX`, the largest scores; one persistent program a multiprocessor.

    A turn is one query tile of one head. Programs take turns from the counter `TAKEN`, which begins at 0
    (`TAKEN_BEFORE`). `OUT_BEFORE`, `LSE_BEFORE` and `MAX_BEFORE` are the partial result to continue; `PLAN.fresh` and
    `PLAN.from_lse` say which of them there are.
    """
    TYPE: gl.constexpr = Q.dtype.element_ty
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    NUMBER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    Q_PLACES: gl.constexpr = PLAN.q_places * PLAN.consumers
    queries = stages_of_heads(TYPE, Q_PLACES, Q_PLACES, CONSUMER_ROWS, F.head_dim)
    bias = queries
    if F.bias:
        BIASES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CONSUMER_ROWS, PLAN.kv_tile], TYPE)
        bias = gl.allocate_shared_memory(TYPE, [PLAN.stages * PLAN.consumers, CONSUMER_ROWS, PLAN.kv_tile], BIASES)
    positions = queries
    if F.distances:
        positions = gl.allocate_shared_memory(gl.float32, [2 * PLAN.stages, PLAN.kv_tile], NUMBER)
    shared = ForwardMemory(
        queries,
        gl.allocate_shared_memory(gl.int64, [PLAN.q_places, 1], BARRIER),
        stages_of_heads(TYPE, PLAN.stages, PLAN.stages, PLAN.kv_tile, F.head_dim),
        gl.allocate_shared_memory(gl.int64, [PLAN.stages, 1], BARRIER),
        gl.allocate_shared_memory(gl.int32, [PLAN.stages, 1], NUMBER),
        bias,
        # One place is enough for the second piece of values: there is time to fetch the piece anew (`add_values`).
        stages_of_heads(TYPE, PLAN.stages, 1, PLAN.kv_tile, F.value_dim),
        gl.allocate_shared_memory(gl.int64, [PLAN.stages, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER) if in_two_pieces(F.value_dim) else 0,
        gl.allocate_shared_memory(gl.int32, [10, 1], NUMBER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        positions,
    )
    begin(shared.q_full, PLAN.q_places)
    begin(shared.k_full, PLAN.stages)
    begin(shared.v_full, PLAN.stages)
    if in_two_pieces(F.value_dim):
        begin(shared.rest_full, 1)
    begin(shared.turns_full, 2)
    BEFORE = (OUT_BEFORE, LSE_BEFORE)
    AFTER = (OUT, LSE)
    if F.max_logits:
        BEFORE = (OUT_BEFORE, LSE_BEFORE, MAX_BEFORE)
        AFTER = (OUT, LSE, MAX)
    ARRAYS = (Q, K, V, OUT)
    all_turns = T.rows * BATCH * F.heads
    if PLAN.consumers == 2:
        gl.warp_specialize(
            [
                (_consume, (0, shared, P, BEFORE, AFTER, F, PLAN)),
                (_consume, (1, shared, P, BEFORE, AFTER, F, PLAN)),
                (produce, (shared, ARRAYS, P, BOUNDS, TILES, TAKEN, all_turns, F, T, BATCH, PLAN)),
            ],
            [4, 1],
            [PLAN.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, shared, P, BEFORE, AFTER, F, PLAN)),
                (_consume, (1, shared, P, BEFORE, AFTER, F, PLAN)),
                (_consume, (2, shared, P, BEFORE, AFTER, F, PLAN)),
                (produce, (shared, ARRAYS, P, BOUNDS, TILES, TAKEN, all_turns, F, T, BATCH, PLAN)),
            ],
            [4, 4, 1],
            [PLAN.registers, PLAN.registers, 24],
        )


class Softmax(NamedTuple):
    """The state of the online softmax between two key tiles of a turn.

    `acc` has the sums of weighted values (`sums`), without those of the last tile: the next step multiplies `acc` by
    `shrink`, and then adds the product of the last tile's `weights` and values. `total` has the sums of weights, and
    `tops` the row maxima (`forward_softmax.score_tile`).
    """

    acc: Any
    weights: Any
    total: Any
    tops: Any
    shrink: Any


class Rows(NamedTuple):
    """A consumer's 64 queries in a turn: the tile `q` in shared memory, and what masks and options need.

    `start` is the number of the first query. `counter` is its dropout counter (`dropout.counter_of_queries`), and
    `from_origin` has the queries' ALiBi positions (`forward_positions.of_queries`).
    """

    q: Any
    queries: Any
    from_origin: Any
    head: Any
    start: Any
    counter: Any
    batch: Any


@gluon.jit
def _no_scores(PLAN: gl.constexpr):
    KV_TILE: gl.constexpr = PLAN.kv_tile
    return gl.zeros([CONSUMER_ROWS, KV_TILE], gl.float32, product_layout(KV_TILE))


@gluon.jit
def _consume(NUMBER: gl.constexpr, shared, P, BEFORE, AFTER, F: gl.constexpr, PLAN: gl.constexpr):
    """The code of consumer `NUMBER`: it computes and writes the results of its 64 queries of every turn."""
    OF_ROWS: gl.constexpr = row_layout(PLAN.kv_tile)
    RAGGED: gl.constexpr = F.q_length % PLAN.q_tile != 0
    nought = _no_scores(PLAN)
    taken = 0
    done = 0
    tops = no_maxima(0.0, F, PLAN)
    weights = pack(nought, shared.k[0].dtype)
    softmax = Softmax(no_sums(F.value_dim), weights, quad_sums(nought), tops, tops[0] + 1.0)
    if PLAN.consumers - 1 == NUMBER:
        _pass_order(NUMBER, PLAN)
    row = next_turn(shared, done)
    while row >= 0:
        batch = read(shared, "batch", done % 2)
        head_number = read(shared, "head", done % 2)
        masked = read(shared, "masked", done % 2)
        whole = read(shared, "whole", done % 2)
        start = row + NUMBER * CONSUMER_ROWS
        # Two products are in flight together: the scores of this turn's first tile, and the weighted values of the
        # previous turn's last tile. In the first turn the second product has no meaning, and its result is not used.
        q = stage_of(shared.q, (done % PLAN.q_places) * PLAN.consumers + NUMBER)
        wait_until_full(shared.q_full, done, PLAN.q_places)
        wait_until_full(shared.k_full, taken, PLAN.stages)
        k = stage_of(shared.k, taken % PLAN.stages)
        _wait_for_order(NUMBER, PLAN)
        s = product_of_heads(q, k, nought, F.head_dim)
        acc = _shrunk(softmax, PLAN)
        before = (taken + PLAN.stages - 1) % PLAN.stages
        acc = add_values(acc, softmax.weights, shared, before, taken - 1, done > 0, F.value_dim, PLAN)
        _pass_order(NUMBER, PLAN)
        head = of_head(P, batch, head_number, F)
        queries = of_rows(P, batch, head_number, start + gl.arange(0, CONSUMER_ROWS, OF_ROWS), 0, F, RAGGED, False)
        from_origin = of_queries(queries, P, batch, row, F)
        loaded_keys = _loaded_keys(shared, taken, P, batch, F, PLAN, PLAN.masked)
        bias = _bias(shared, taken, NUMBER, F, PLAN)
        away = of_keys(shared, taken, F, PLAN)
        counter = counter_of_queries(P, batch, row, NUMBER, F, PLAN)
        rows = Rows(q, queries, from_origin, head, start, counter, batch)
        if F.dropout and counter < 0:
            drawn = _drawn(shared, taken, P, rows, True, F, PLAN)
        else:
            drawn = _drawn(shared, taken, P, rows, False, F, PLAN)
        old_tops, old_total = softmax.tops, softmax.total
        tops, total_before = continued_rows(BEFORE, start, batch, head_number, F, PLAN)
        total = as_quads(total_before)
        s = warpgroup_mma_wait(accumulators(F.value_dim), deps=[s])
        arrive_at("k_empty", taken % PLAN.stages, PLAN)
        keys = _keys(loaded_keys, F, PLAN, PLAN.masked)
        s, base, tops, shrink = score_tile(s, tops, rows, keys, bias, away, F, PLAN.masked, PLAN)
        p, total = weigh_tile(s, base, shrink, total, drawn, F, PLAN)
        acc = wait_for_sums(acc)
        if done > 0:
            arrive_at("v_empty", before, PLAN)
            if in_two_pieces(F.value_dim):
                arrive_at("rest_empty", 0, PLAN)
            write_results(acc, old_tops, old_total, shared, done - 1, NUMBER, AFTER, F, PLAN)
        acc = no_sums(F.value_dim)
        if not PLAN.fresh:
            acc = load_sums(BEFORE[0], start, batch, head_number, F)
            # Unless scores are bounded, `total_before` is 1 (or 0 for a row that saw nothing, whose `acc` is 0).
            factor = total_before if PLAN.bounded else shrink
            if F.dropout:
                factor = factor * (1.0 / F.keep_weight)
            acc = rescale(acc, factor)
            # No product is in flight. The wait keeps the compiler from delaying the multiplication into the registers
            # of the next product.
            acc = wait_for_sums(acc)
        shrink = gl.full([CONSUMER_ROWS], 1.0, gl.float32, OF_ROWS)
        softmax = Softmax(acc, pack(p, q[0].dtype), total, tops, shrink)
        taken += 1
        if F.dropout and counter < 0:
            softmax, taken = _other_steps(softmax, rows, shared, taken, masked, whole, NUMBER, P, True, F, PLAN)
        else:
            softmax, taken = _other_steps(softmax, rows, shared, taken, masked, whole, NUMBER, P, False, F, PLAN)
        if PLAN.q_places == 1:
            arrive_at("q_empty", 0, PLAN)
        done += 1
        row = next_turn(shared, done)
    if done > 0:
        acc = _shrunk(softmax, PLAN)
        last = taken - 1
        acc = wait_for_sums(add_values(acc, softmax.weights, shared, last % PLAN.stages, last, True, F.value_dim, PLAN))
        write_results(acc, softmax.tops, softmax.total, shared, done - 1, NUMBER, AFTER, F, PLAN)


@gluon.jit
def _shrunk(softmax, PLAN: gl.constexpr):
    """The accumulators of `softmax`, as the next product needs them."""
    if PLAN.bounded:
        return softmax.acc
    else:
        return rescale(softmax.acc, softmax.shrink)


@gluon.jit
def _wait_for_order(NUMBER: gl.constexpr, PLAN: gl.constexpr):
    """Waits, if the plan is `ordered`, until consumer `NUMBER` may begin its products.

    Consumers use the tensor cores in rotation: a consumer begins both products of a step when the consumer before it
    has begun its own. Its softmax then overlaps with the products of the others.
    """
    if PLAN.ordered:
        sync_at("order", NUMBER, PLAN)


@gluon.jit
def _pass_order(NUMBER: gl.constexpr, PLAN: gl.constexpr):
    """Lets the consumer after consumer `NUMBER` begin its products."""
    if PLAN.ordered:
        arrive_at("order", (NUMBER + 1) % PLAN.consumers, PLAN)


@gluon.jit
def _other_steps(
    softmax, rows, shared, taken, masked, whole, NUMBER: gl.constexpr, P, OWN_DRAWS: gl.constexpr, F: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Computes the key tiles of a turn after its first. `OWN_DRAWS`: each entry has a dropout draw of its own."""
    first = 1
    if PLAN.masked:
        for _ in range(1, masked):
            softmax = _continued(softmax, rows, shared, taken, NUMBER, P, OWN_DRAWS, F, True, PLAN)
            taken += 1
        first = gl.where(masked > 0, 0, 1)
    for _ in range(first, whole):
        softmax = _continued(softmax, rows, shared, taken, NUMBER, P, OWN_DRAWS, F, False, PLAN)
        taken += 1
    return softmax, taken


@gluon.jit
def _continued(
    softmax, rows, shared, taken, NUMBER: gl.constexpr, P, OWN_DRAWS: gl.constexpr, F: gl.constexpr,
    MASKED: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: computes a key tile's scores together with the last tile's weighted values."""
    last = taken - 1
    wait_until_full(shared.k_full, taken, PLAN.stages)
    _wait_for_order(NUMBER, PLAN)
    k = stage_of(shared.k, taken % PLAN.stages)
    s = product_of_heads(rows.q, k, _no_scores(PLAN), F.head_dim)
    acc = _shrunk(softmax, PLAN)
    acc = add_values(acc, softmax.weights, shared, last % PLAN.stages, last, True, F.value_dim, PLAN)
    _pass_order(NUMBER, PLAN)
    loaded_keys = _loaded_keys(shared, taken, P, rows.batch, F, PLAN, MASKED)
    bias = _bias(shared, taken, NUMBER, F, PLAN)
    # Positions that are loaded before the scores are computed occupy 32 more registers.
    LATE: gl.constexpr = PLAN.one_sided or PLAN.consumers == 3
    away = 0
    if not LATE:
        away = of_keys(shared, taken, F, PLAN)
    drawn = _drawn(shared, taken, P, rows, OWN_DRAWS, F, PLAN)
    s = warpgroup_mma_wait(accumulators(F.value_dim), deps=[s])
    arrive_at("k_empty", taken % PLAN.stages, PLAN)
    s = after_arrival(s, accumulators(F.value_dim))
    keys = _keys(loaded_keys, F, PLAN, MASKED)
    if LATE:
        away = of_keys(shared, taken, F, PLAN)
    s, base, tops, shrink = score_tile(s, softmax.tops, rows, keys, bias, away, F, MASKED, PLAN)
    if in_two_pieces(F.value_dim):
        # The second piece of values has one place, and its product began first. If the place is freed before the
        # exponentials, it is filled again while the other consumer computes.
        acc = acc[0], warpgroup_mma_wait(1, deps=[acc[1]])
        arrive_at("rest_empty", 0, PLAN)
        base = after_barriers(base, shared.tiles)
    softmax_first(taken)
    p, total = weigh_tile(s, base, shrink, softmax.total, drawn, F, PLAN)
    acc = wait_for_sums(acc)
    arrive_at("v_empty", last % PLAN.stages, PLAN)
    return Softmax(acc, pack(p, rows.q[0].dtype), total, tops, shrink)


@gluon.jit
def _loaded_keys(shared, taken, P, batch, F: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr):
    """Loads the `Keys` of key tile number `taken` of this program if it needs a mask (`MASKED`); else returns 0.

    Each thread loads one key, while products are in flight. After the scores have arrived, `_keys` converts the keys to
    the layout of scores, in which each thread has 32.
    """
    if MASKED:
        start = read_number(shared.tiles.index(taken % PLAN.stages), 4) * PLAN.kv_tile
        EACH: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))
        return of_columns(P, batch, start, gl.arange(0, PLAN.kv_tile, EACH), 0, F, PLAN.kv_tile, False)
    else:
        return 0


@gluon.jit
def _keys(loaded, F: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr):
    """Converts the result of `_loaded_keys` to the layout of scores, through shared memory."""
    SCORES: gl.constexpr = product_layout(PLAN.kv_tile)
    if MASKED:
        column = loaded.start + gl.arange(0, PLAN.kv_tile, gl.SliceLayout(0, SCORES))[None, :]
        inside = column < F.kv_length
        if F.kv_length % PLAN.kv_tile != 0:
            column = gl.minimum(column, F.kv_length - 1)
        position, index, segment = loaded.position, loaded.index, loaded.segment
        if F.positions:
            position = gl.convert_layout(position, SCORES)
        if F.padded:
            index = gl.convert_layout(index, SCORES)
        if F.segments:
            segment = gl.convert_layout(segment, SCORES)
        return Keys(loaded.start, column, inside, position, index, 0, segment)
    else:
        return loaded


@gluon.jit
def _bias(shared, taken, NUMBER: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """Loads this consumer's bias of key tile number `taken` from shared memory; returns 0 if the call has no bias."""
    if F.bias:
        return shared.bias.index((taken % PLAN.stages) * PLAN.consumers + NUMBER).load(product_layout(PLAN.kv_tile))
    else:
        return 0


@gluon.jit
def _drawn(shared, taken, P, rows, OWN_DRAWS: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """The dropout bits of key tile number `taken`, in the two words of `dropout.draws`; zeros without dropout."""
    if F.dropout:
        tile = read_number(shared.tiles.index(taken % PLAN.stages), 4)
        return draws(P, rows.batch, rows.start, tile, rows.counter, rows.head.dropout_key, OWN_DRAWS, F, PLAN.kv_tile)
    else:
        return 0, 0
