# SPDX-License-Identifier: Apache-2.0
"""The forward kernel for Hopper: an online softmax by warpgroups that use the tensor cores in rotation.

The producer fetches tiles, several tiles ahead. Each consumer computes 64 queries. While a consumer takes the
exponentials of one key tile, the tensor cores multiply the weights of its previous key tile by the values, and compute
for the other consumers. Programs take turns, each a query tile of one head, from a common counter until none is left,
and fetch the first tiles of the next turn while they write the results of the last.

All barriers of a program. The first five lie in shared memory; the others are hardware barriers, and their numbers of
threads count both who arrives and who waits. A consumer has 128 threads:

| barrier | of each | who arrives | who waits | says |
|---|---|---|---|---|
| q_full | stage of a consumer's queries | TMA | this consumer | its queries of a turn are there |
| k_full | stage of keys | TMA | consumers | keys of a step, and its bias, are there |
| v_full | stage of values | TMA | consumers | values of a step (the first piece) are there |
| rest_full | - | TMA | consumers | the second piece of the values is there, if they have two |
| turn_full | stage of turns | producer | consumers | the numbers of the next turn can be read |
| order | consumer | the consumer before it, 128 | this consumer, 128 | it may begin the products of a step |
| k_empty | stage of keys | consumers | producer, 32 | they are done with the stage |
| v_empty | stage of values | consumers | producer, 32 | they are done with the stage |
| rest_empty | - | consumers | producer, 32 | they are done with the second piece |
| turn_done | stage of turns | consumers | producer, 32 | a turn's results are written, or lie in shared memory |
| q_empty | consumer | this consumer, 128 | producer, 32 | its last scores of the turn are computed |

q_empty is for queries with one stage; with two, turn_done says that those of the turn are free too. No consumer arrives
twice at a hardware barrier before the producer has waited once: the producer waits before it fills a stage again, and
consumers read the stage only then.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..kernels.scores import of_head
from ..kernels.tokens import Keys, of_columns, of_rows
from .dropout import counter_of_queries, draws
from .forward_positions import key_offsets, query_offsets
from .forward_results import load_rows, load_sums, no_maxima, write_results
from .forward_softmax import score_tile, weigh_tile
from .forward_transfers import ForwardMemory, Turns, next_first_query, produce, read
from .hardware_barriers import arrive_at, begin, phase_of, read_number, sync_at, wait_until_full
from .head_tiles import in_two_pieces, product_of_heads, stage_of, stages_of_heads, stages_of_tiles
from .layouts import CONSUMER_ROWS, product_layout, row_layout, single_layout
from .plans import SINGLE_WARP_REGISTERS
from .sums import accumulators, add_values, as_quads, no_sums, pack, quad_sums, rescale, wait_for_sums
from .workarounds import after_arrival, after_barriers, softmax_first


@gluon.jit
def forward(
    Q, K, V, P,
    BOUNDS, TILES, OUT_BEFORE, LSE_BEFORE, MAX_BEFORE, COUNTER_BEFORE, OUT, LSE, MAX, COUNTER,
    F: gl.constexpr, T: gl.constexpr, BATCH: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Writes `OUT`, `LSE` and, if `F.max_logits`, `MAX`, the largest scores; one persistent program a multiprocessor.

    `COUNTER` counts the turns that programs have taken; it is 0 at first (`COUNTER_BEFORE`). `OUT_BEFORE`, `LSE_BEFORE`
    and `MAX_BEFORE` are the partial result to continue; `PLAN.fresh` and `PLAN.from_lse` say which of them there are.
    """
    TYPE: gl.constexpr = Q.dtype.element_ty
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SINGLE: gl.constexpr = single_layout()
    Q_STAGES: gl.constexpr = PLAN.q_stages * PLAN.consumers
    STAGES: gl.constexpr = PLAN.kv_stages
    queries = stages_of_heads(TYPE, Q_STAGES, Q_STAGES, CONSUMER_ROWS, F.head_dim)
    bias = stages_of_tiles(TYPE, STAGES * PLAN.consumers, CONSUMER_ROWS, PLAN.kv_tile) if F.bias else queries
    offsets = gl.allocate_shared_memory(gl.float32, [2 * STAGES, PLAN.kv_tile], SINGLE) if F.slopes else queries
    shared = ForwardMemory(
        queries,
        gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER),
        stages_of_heads(TYPE, STAGES, STAGES, PLAN.kv_tile, F.head_dim),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], SINGLE),
        bias,
        # One stage is enough for the second piece of values: there is time to fetch the piece anew (`add_values`).
        stages_of_heads(TYPE, STAGES, 1, PLAN.kv_tile, F.value_dim),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER) if in_two_pieces(F.value_dim) else 0,
        gl.allocate_shared_memory(gl.int32, [10, 1], SINGLE),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        offsets,
    )
    begin(shared.q_full, Q_STAGES)
    begin(shared.k_full, STAGES)
    begin(shared.v_full, STAGES)
    if in_two_pieces(F.value_dim):
        begin(shared.rest_full, 1)
    begin(shared.turn_full, 2)
    BEFORE = (OUT_BEFORE, LSE_BEFORE, MAX_BEFORE)
    AFTER = (OUT, LSE, MAX)
    ARRAYS = (Q, K, V, OUT)
    turns = Turns(BOUNDS, TILES, COUNTER, T.rows * BATCH * F.heads)
    gl.warp_specialize(
        [
            (_consume, (0, shared, P, BEFORE, AFTER, F, PLAN)),
            (_consume, (1, shared, P, BEFORE, AFTER, F, PLAN)),
            (produce, (shared, ARRAYS, P, turns, F, T, BATCH, PLAN)),
        ]
        if PLAN.consumers == 2
        else [
            (_consume, (0, shared, P, BEFORE, AFTER, F, PLAN)),
            (_consume, (1, shared, P, BEFORE, AFTER, F, PLAN)),
            (_consume, (2, shared, P, BEFORE, AFTER, F, PLAN)),
            (produce, (shared, ARRAYS, P, turns, F, T, BATCH, PLAN)),
        ],
        [4] * (PLAN.consumers - 1) + [1],
        [PLAN.registers] * (PLAN.consumers - 1) + [SINGLE_WARP_REGISTERS],
    )


class Softmax(NamedTuple):
    """The state of the online softmax between two steps of a turn.

    `acc` lacks the weighted values of the last step: the next step multiplies `acc` by `shrink`, and then adds the
    product of the last step's `weights` and values.
    """

    acc: Any  # the sums of weighted values (`sums`)
    weights: Any  # of the last step, packed
    total: Any  # the sums of weights, in four parts (`sums.quad_sums`)
    tops: Any  # the row maxima (`forward_softmax.Scores`)
    shrink: Any


class OwnQueries(NamedTuple):
    """A consumer's 64 queries in a turn, and what the turn's steps read for them."""

    shared: Any
    inputs: Any  # P
    q: Any  # the tile in shared memory
    queries: Any  # what masks need (`kernels.tokens.Queries`)
    offsets: Any  # ALiBi positions (`forward_positions.query_offsets`)
    head: Any  # `kernels.scores.Head`
    start: Any  # the number of the first query
    counter: Any  # the dropout counter of the first query (`dropout.counter_of_queries`)
    batch: Any
    end: Any  # the last step of the turn


@gluon.jit
def _consume(CONSUMER: gl.constexpr, shared, P, BEFORE, AFTER, F: gl.constexpr, PLAN: gl.constexpr):
    """The code of consumer `CONSUMER`: it computes and writes the results of its 64 queries of every turn."""
    OF_ROWS: gl.constexpr = row_layout(PLAN.kv_tile)
    RAGGED: gl.constexpr = F.q_length % PLAN.q_tile != 0
    KV_TILE: gl.constexpr = PLAN.kv_tile
    nothing = gl.zeros([CONSUMER_ROWS, KV_TILE], gl.float32, product_layout(KV_TILE))
    ones = gl.full([CONSUMER_ROWS], 1.0, gl.float32, OF_ROWS)
    steps_done = 0
    turns_done = 0
    tops = no_maxima(0.0, F, PLAN)
    weights = pack(nothing, shared.k[0].dtype)
    softmax = Softmax(no_sums(F.value_dim), weights, quad_sums(nothing), tops, ones)
    if PLAN.consumers - 1 == CONSUMER:  # the last consumer lets the first one begin
        _pass_order(CONSUMER, PLAN)
    first_query = next_first_query(shared, turns_done)
    while first_query >= 0:
        batch = read(shared, "batch", turns_done % 2)
        head_number = read(shared, "head", turns_done % 2)
        masked = read(shared, "masked", turns_done % 2)
        whole = read(shared, "whole", turns_done % 2)
        start = first_query + CONSUMER * CONSUMER_ROWS
        end = steps_done + masked + whole - 1
        # Two products are in flight together: the weighted values of the previous turn's last step, which need not wait
        # for this turn's queries, and the scores of this turn's first step. In the first turn the first product has no
        # meaning, and its result is not used.
        q_stage = turns_done % PLAN.q_stages * PLAN.consumers + CONSUMER
        q = stage_of(shared.q, q_stage)
        last_stage = (steps_done + PLAN.kv_stages - 1) % PLAN.kv_stages
        last = steps_done - 1
        acc = softmax.acc if PLAN.bounded else rescale(softmax.acc, softmax.shrink)
        acc = add_values(acc, softmax.weights, shared, last_stage, last, turns_done > 0, F.value_dim, PLAN)
        mbarrier.wait(shared.q_full.index(q_stage), phase_of(turns_done, PLAN.q_stages))
        wait_until_full(shared.k_full, steps_done, PLAN.kv_stages)
        k = stage_of(shared.k, steps_done % PLAN.kv_stages)
        _wait_for_order(CONSUMER, PLAN)
        s = product_of_heads(q, k, F.head_dim)
        _pass_order(CONSUMER, PLAN)
        head = of_head(P, batch, head_number, F)
        queries = of_rows(P, batch, head_number, start + gl.arange(0, CONSUMER_ROWS, OF_ROWS), 0, F, RAGGED, False)
        offsets = query_offsets(queries, P, batch, first_query, F)
        loaded_keys = _load_keys(shared, steps_done, P, batch, F, PLAN, PLAN.masked)
        bias = _load_bias(shared, steps_done, CONSUMER, F, PLAN)
        of_keys = key_offsets(shared, steps_done, F, PLAN)
        counter = counter_of_queries(P, batch, first_query, CONSUMER, F, PLAN)
        own = OwnQueries(shared, P, q, queries, offsets, head, start, counter, batch, end)
        if F.dropout and counter < 0:
            drawn = _draws(own, steps_done, True, F, PLAN)
        else:
            drawn = _draws(own, steps_done, False, F, PLAN)
        old_tops, old_total = softmax.tops, softmax.total
        tops, total_before = load_rows(BEFORE, start, batch, head_number, F, PLAN)
        total = as_quads(total_before)
        s = warpgroup_mma_wait(0, deps=[s])
        arrive_at("k_empty", steps_done % PLAN.kv_stages, PLAN)
        _free_queries(own, steps_done, CONSUMER, PLAN)
        keys = _spread_keys(loaded_keys, F, PLAN, PLAN.masked)
        s, base, tops, shrink = score_tile(s, tops, own, keys, bias, of_keys, F, PLAN.masked, PLAN)
        p, total = weigh_tile(s, base, shrink, total, drawn, F, PLAN)
        acc = wait_for_sums(acc)
        if turns_done > 0:
            arrive_at("v_empty", last_stage, PLAN)
            if in_two_pieces(F.value_dim):
                arrive_at("rest_empty", 0, PLAN)
            write_results(acc, old_tops, old_total, shared, turns_done - 1, CONSUMER, AFTER, F, PLAN)
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
        softmax = Softmax(acc, pack(p, q[0].dtype), total, tops, ones)
        steps_done += 1
        if F.dropout and counter < 0:
            softmax, steps_done = _other_steps(softmax, own, steps_done, masked, whole, CONSUMER, True, F, PLAN)
        else:
            softmax, steps_done = _other_steps(softmax, own, steps_done, masked, whole, CONSUMER, False, F, PLAN)
        turns_done += 1
        first_query = next_first_query(shared, turns_done)
    if turns_done > 0:
        acc = softmax.acc if PLAN.bounded else rescale(softmax.acc, softmax.shrink)
        last = steps_done - 1
        acc = add_values(acc, softmax.weights, shared, last % PLAN.kv_stages, last, True, F.value_dim, PLAN)
        acc = wait_for_sums(acc)
        write_results(acc, softmax.tops, softmax.total, shared, turns_done - 1, CONSUMER, AFTER, F, PLAN)


@gluon.jit
def _wait_for_order(CONSUMER: gl.constexpr, PLAN: gl.constexpr):
    """Waits, if consumers use the tensor cores in rotation, until consumer `CONSUMER` may begin its products.

    A consumer begins the products of a step when the consumer before it has begun its own, but in the first step of a
    turn the product of the last values earlier. Its softmax then overlaps with the products of the others.
    """
    if PLAN.in_rotation:
        sync_at("order", CONSUMER, PLAN)


@gluon.jit
def _pass_order(CONSUMER: gl.constexpr, PLAN: gl.constexpr):
    """Lets the consumer after consumer `CONSUMER` begin its products."""
    if PLAN.in_rotation:
        arrive_at("order", (CONSUMER + 1) % PLAN.consumers, PLAN)


@gluon.jit
def _free_queries(own, step, CONSUMER: gl.constexpr, PLAN: gl.constexpr):
    """After the scores of a turn's last step: lets the producer replace this consumer's queries, if they have one
    stage."""
    if PLAN.q_stages == 1 and step == own.end:
        arrive_at("q_empty", CONSUMER, PLAN)


@gluon.jit
def _other_steps(
    softmax, own, steps_done, masked, whole, CONSUMER: gl.constexpr, OWN_DRAWS: gl.constexpr, F: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Computes the steps of a turn after its first. `OWN_DRAWS`: each entry has a dropout draw of its own."""
    first = 1
    if PLAN.masked:
        for _ in range(1, masked):
            softmax = _step(softmax, own, steps_done, CONSUMER, OWN_DRAWS, F, True, PLAN)
            steps_done += 1
        first = gl.where(masked > 0, 0, 1)
    for _ in range(first, whole):
        softmax = _step(softmax, own, steps_done, CONSUMER, OWN_DRAWS, F, False, PLAN)
        steps_done += 1
    return softmax, steps_done


@gluon.jit
def _step(
    softmax, own, step, CONSUMER: gl.constexpr, OWN_DRAWS: gl.constexpr, F: gl.constexpr, MASKED: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """Step `step` of the program: computes a key tile's scores together with the last tile's weighted values."""
    shared = own.shared
    last = step - 1
    wait_until_full(shared.k_full, step, PLAN.kv_stages)
    _wait_for_order(CONSUMER, PLAN)
    s = product_of_heads(own.q, stage_of(shared.k, step % PLAN.kv_stages), F.head_dim)
    acc = softmax.acc if PLAN.bounded else rescale(softmax.acc, softmax.shrink)
    acc = add_values(acc, softmax.weights, shared, last % PLAN.kv_stages, last, True, F.value_dim, PLAN)
    _pass_order(CONSUMER, PLAN)
    loaded_keys = _load_keys(shared, step, own.inputs, own.batch, F, PLAN, MASKED)
    bias = _load_bias(shared, step, CONSUMER, F, PLAN)
    # Positions that are loaded before the scores are computed occupy 32 more registers.
    LATE: gl.constexpr = PLAN.one_sided or PLAN.consumers == 3
    of_keys = 0 if LATE else key_offsets(shared, step, F, PLAN)
    drawn = _draws(own, step, OWN_DRAWS, F, PLAN)
    s = warpgroup_mma_wait(accumulators(F.value_dim), deps=[s])
    arrive_at("k_empty", step % PLAN.kv_stages, PLAN)
    s = after_arrival(s, accumulators(F.value_dim))
    keys = _spread_keys(loaded_keys, F, PLAN, MASKED)
    if LATE:
        of_keys = key_offsets(shared, step, F, PLAN)
    s, base, tops, shrink = score_tile(s, softmax.tops, own, keys, bias, of_keys, F, MASKED, PLAN)
    if in_two_pieces(F.value_dim):
        # The second piece of values has one stage, and its product began first. If the stage is freed before the
        # exponentials, it is filled again while the other consumer computes.
        acc = acc[0], warpgroup_mma_wait(1, deps=[acc[1]])
        arrive_at("rest_empty", 0, PLAN)
        base = after_barriers(base, shared.tiles)
    _free_queries(own, step, CONSUMER, PLAN)
    softmax_first(step)
    p, total = weigh_tile(s, base, shrink, softmax.total, drawn, F, PLAN)
    acc = wait_for_sums(acc)
    arrive_at("v_empty", last % PLAN.kv_stages, PLAN)
    return Softmax(acc, pack(p, own.q[0].dtype), total, tops, shrink)


@gluon.jit
def _load_keys(shared, step, P, batch, F: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr):
    """Loads the `Keys` of step `step` if the tile needs a mask (`MASKED`); else returns 0.

    Each thread loads one key, while products are in flight. After the scores have arrived, `_spread_keys` converts the
    keys to the layout of scores, in which each thread has 32.
    """
    if MASKED:
        start = read_number(shared.tiles.index(step % PLAN.kv_stages), 4) * PLAN.kv_tile
        EACH: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))
        return of_columns(P, batch, start, gl.arange(0, PLAN.kv_tile, EACH), 0, F, PLAN.kv_tile, False)
    else:
        return 0


@gluon.jit
def _spread_keys(loaded, F: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr):
    """Converts the result of `_load_keys` to the layout of scores, through shared memory."""
    SCORES: gl.constexpr = product_layout(PLAN.kv_tile)
    if MASKED:
        column = loaded.start + gl.arange(0, PLAN.kv_tile, gl.SliceLayout(0, SCORES))[None, :]
        inside = column < F.kv_length
        if F.kv_length % PLAN.kv_tile != 0:
            column = gl.minimum(column, F.kv_length - 1)
        position = gl.convert_layout(loaded.position, SCORES) if F.positions else loaded.position
        index = gl.convert_layout(loaded.index, SCORES) if F.padded else loaded.index
        segment = gl.convert_layout(loaded.segment, SCORES) if F.segments else loaded.segment
        return Keys(loaded.start, column, inside, position, index, 0, segment)
    else:
        return loaded


@gluon.jit
def _load_bias(shared, step, CONSUMER: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """Loads this consumer's bias of step `step` from shared memory; returns 0 if the call has no bias."""
    if F.bias:
        stage = step % PLAN.kv_stages
        return shared.bias.index(stage * PLAN.consumers + CONSUMER).load(product_layout(PLAN.kv_tile))
    else:
        return 0


@gluon.jit
def _draws(own, step, OWN_DRAWS: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """The dropout bits of step `step`, in the two words of `dropout.draws`; zeros without dropout."""
    if F.dropout:
        tile = read_number(own.shared.tiles.index(step % PLAN.kv_stages), 4)
        key = own.head.dropout_key
        return draws(own.inputs, own.batch, own.start, tile, own.counter, key, OWN_DRAWS, F, PLAN.kv_tile)
    else:
        return 0, 0
