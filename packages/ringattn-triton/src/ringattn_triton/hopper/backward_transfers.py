# SPDX-License-Identifier: Apache-2.0
"""The three single warps of a one-pass backward program: one takes turns and fetches tiles, two add dq to memory."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..kernels.tile_loop import owned
from .backward_memory import barrier, first_stage, next_turn, result_place, wait_for_room, write
from .backward_turns import next_step, rank_of, steps_of, take_turn, tile_at
from .hardware_barriers import arrive_at, sync_at
from .head_tiles import fetch_heads, padded_size, shared_group, stage_of
from .workarounds import async_atomic_add, fetch, store, wait_for_additions


class BackwardTiles(NamedTuple):
    """TMA descriptors of the tiles in global memory that a program fetches and writes."""

    k: Any
    v: Any
    q: Any
    dout: Any
    lse: Any
    delta: Any
    query_values: Any  # used if `PLAN.query_kinds` has any
    dq: Any  # a tile is a square, in the order of `dq_order`
    dk: Any  # this and `dv` are used if `PLAN.results_by_tma`
    dv: Any
    bias: Any  # 0 in a call without a bias
    ds: Any  # 0 in a launch that stores no ds


class Order(NamedTuple):
    """When a turn may add to a tile of dq: when `counter` has reached `rank`. Both are 0 unless `PLAN.ordered`."""

    counter: Any  # points to the number of turns that have added to the tile
    rank: Any
    reached: Any  # what the counter was a while ago


@gluon.constexpr_function
def by_batch(F):
    """Whether the values of `PLAN.query_kinds` (positions, segment ids) differ between batch rows."""
    ranges = F.q_first_batch > 0 or F.q_last_batch > 0
    return ranges or F.segments or (F.slopes and F.q_positions_batch > 0)


@gluon.jit
def fetch_tiles(shared, tiles, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The code of the producer: takes turns and fetches their keys, values and visited query tiles.

    The next turn is taken only when all fetches of this turn have begun, so that no turn waits long for a busy program.
    The keys of a turn arrive at the barrier of its first queries, the values at that of its first dout. They are
    fetched after these queries and dout, when the previous turn no longer needs its own keys and values.
    """
    DIM: gl.constexpr = padded_size(F.head_dim)
    VALUE_DIM: gl.constexpr = padded_size(F.value_dim)
    KINDS: gl.constexpr = len(PLAN.query_kinds)
    # How many bytes arrive: of float32 values of queries, of lse or -delta, of a bias, and of all that comes with q.
    VALUES: gl.constexpr = PLAN.q_tile * 4
    TO_SUBTRACT: gl.constexpr = PLAN.q_tile * 16 * 2 if PLAN.subtracting else VALUES
    OF_BIAS: gl.constexpr = PLAN.q_tile * PLAN.kv_tile * 2 if F.bias else 0
    OF_Q: gl.constexpr = PLAN.q_tile * DIM * 2 + TO_SUBTRACT + VALUES * KINDS + OF_BIAS
    to_subtract = shared.split if PLAN.subtracting else shared.per_query  # first the stages of lse, then of -delta
    turns_done = 0
    steps_done = 0
    # For how many arrivals at dout_empty this warp has waited: a hardware barrier must be waited for once for each. At
    # a turn's first step it also waits for the step before, one step early, so the number does not follow from
    # `steps_done`.
    dout_emptied = 0
    turn = take_turn(turns, T, PLAN)
    while turn < turns.count:
        owner = owned(turn, T, F.kv_heads)
        key_tile, batch, kv_head = owner
        steps = steps_of(turn, owner, turns, T, PLAN)
        _announce(shared, turns_done, turn, steps.masked_before, steps.whole, steps.masked_after)
        count = steps.masked_before + steps.whole + steps.masked_after
        step = 0
        member = 0
        ahead = tile_at(steps, 0, T, PLAN)
        for number in range(0, F.group * count):
            head = kv_head * F.group + member
            tile = ahead
            step, member = next_step(step, member, count, F, PLAN)
            ahead = tile_at(steps, step, T, PLAN)
            begins = number == 0
            stage = steps_done % PLAN.q_stages
            token = batch * F.q_length + tile * PLAN.q_tile
            values_at = [batch * F.heads + head, tile * PLAN.q_tile]
            if PLAN.subtracting:
                values_at = [((batch * F.heads + head) * T.columns + tile) * PLAN.q_tile, 0]
            q_full = shared.q_full.index(stage)
            if steps_done >= PLAN.q_stages:
                sync_at("q_empty", stage, PLAN)
            write(shared, "tile", stage, tile)
            _expect(q_full, OF_Q, PLAN.kv_tile * DIM * 2, begins)
            fetch_heads(tiles.q, head, token, q_full, stage_of(shared.q, stage))
            fetch(tiles.lse, values_at, q_full, to_subtract.index(stage))
            for kind in gl.static_range(KINDS):
                values = shared.per_query.index(first_stage(PLAN.query_kinds[kind], PLAN) + stage)
                line = shared_group(batch, head, by_batch(F), F.ranges_by_head, F.heads) * KINDS + kind
                fetch(tiles.query_values, [line, tile * PLAN.q_tile], q_full, values)
            if F.bias:
                group = shared_group(batch, head, F.bias_batch, F.bias_head, F.heads)
                bias_at = [group, tile * PLAN.q_tile, key_tile * PLAN.kv_tile]
                fetch(tiles.bias, bias_at, q_full, shared.bias.index(stage).reshape((1, PLAN.q_tile, PLAN.kv_tile)))
            stage = steps_done % PLAN.dout_stages
            dout_full = barrier(shared, "dout_full", stage)
            if dout_emptied + PLAN.dout_stages <= steps_done:
                sync_at("dout_empty", stage, PLAN)
                dout_emptied += 1
            _expect(dout_full, PLAN.q_tile * VALUE_DIM * 2 + TO_SUBTRACT, PLAN.kv_tile * VALUE_DIM * 2, begins)
            fetch_heads(tiles.dout, head, token, dout_full, stage_of(shared.dout, PLAN.dout_first + stage))
            fetch(tiles.delta, values_at, dout_full, to_subtract.index(PLAN.q_stages + stage))
            if begins:
                if PLAN.wide:
                    wait_for_room(shared, "kv_empty", turns_done, 1)
                # A consumer that is done with a turn's last dout is done with its keys and values too: of the products
                # that read k and v, that of dq is the last, and consumers wait for it before dout_empty
                # (`backward_products._step`).
                elif dout_emptied < steps_done:
                    sync_at("dout_empty", (steps_done - 1) % PLAN.dout_stages, PLAN)
                    dout_emptied += 1
                token = batch * F.kv_length + key_tile * PLAN.kv_tile
                fetch_heads(tiles.k, kv_head, token, q_full, stage_of(shared.k, 0))
                fetch_heads(tiles.v, kv_head, token, dout_full, stage_of(shared.v, PLAN.v_first))
            steps_done += 1
        turns_done += 1
        turn = take_turn(turns, T, PLAN)
    _announce(shared, turns_done, turn, 0, 0, 0)


@gluon.jit
def _expect(full, BYTES: gl.constexpr, MORE: gl.constexpr, more):
    """Tells barrier `full` how many bytes will arrive: `BYTES`, or `BYTES + MORE` if `more` (a turn's first step)."""
    if more:
        mbarrier.expect(full, BYTES + MORE)
    else:
        mbarrier.expect(full, BYTES)


@gluon.jit
def _announce(shared, turns_done, turn, masked_before, whole, masked_after):
    """Tells the other warps the next turn and its numbers of steps, once those are done with the turn before last."""
    stage = turns_done % 2
    wait_for_room(shared, "turn_empty", turns_done, 2)
    write(shared, "turn", stage, turn)
    write(shared, "masked_before", stage, masked_before)
    write(shared, "whole", stage, whole)
    write(shared, "masked_after", stage, masked_after)
    mbarrier.arrive(barrier(shared, "turn_full", stage), count=1)


@gluon.jit
def add_dq(WRITER: gl.constexpr, shared, tiles, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The code of writer `WRITER`: adds the squares of each dq tile to memory as the consumers compute them.

    The two writers take alternate steps. Where the plan is `ordered`, a query tile has a counter of the turns that have
    added to it. A turn waits until the counter equals its rank among the turns that visit the tile, and raises the
    counter when its addition has reached memory. This takes about as long as a step: one writer alone would hold the
    consumers up. The counter must be raised with release semantics: without it, bits differ from run to run.

    No turn waits for ever: ranks follow the order in which turns are taken, so that a turn waits only for turns that a
    running program has taken before. Among unfinished turns the earliest waits for no other.
    """
    Q_TILES: gl.constexpr = T.columns
    TYPE: gl.constexpr = shared.q[0].dtype
    if WRITER == 0:  # at first both places are empty
        arrive_at("dq_empty", 0, PLAN)
        arrive_at("dq_empty", 1, PLAN)
    steps_done = 0
    turns_done = 0
    turn = next_turn(shared, turns_done, 1)
    while turn < turns.count:
        owner = owned(turn, T, F.kv_heads)
        key_tile, batch, kv_head = owner
        mbarrier.arrive(barrier(shared, "turn_empty", turns_done % 2), count=1)
        steps = steps_of(turn, owner, turns, T, PLAN)
        count = steps.masked_before + steps.whole + steps.masked_after
        step = 0
        member = 0
        start = (steps_done + WRITER) % 2
        if start == 1:
            step, member = next_step(step, member, count, F, PLAN)
        ahead = tile_at(steps, step, T, PLAN)
        for _ in range(start, F.group * count, 2):
            tile = ahead
            head_tiles = (batch * F.heads + kv_head * F.group + member) * Q_TILES  # the number of the head's first tile
            counters = turns.counters + 1 + head_tiles
            step, member = next_step(step, member, count, F, PLAN)
            step, member = next_step(step, member, count, F, PLAN)
            ahead = tile_at(steps, step, T, PLAN)
            rank = 0
            reached = 0
            if PLAN.ordered:
                rank = rank_of(tile, turn, owner, turns, T, PLAN)
                reached = gl.load(counters + tile, volatile=True)
            if PLAN.wide:
                dq = tiles.dq
                _add_wide_squares(dq, head_tiles + tile, Order(counters + tile, rank, reached), shared, WRITER, F, PLAN)
            else:
                ds_row = 0
                if PLAN.strip_rows:
                    in_strip = key_tile - gl.load(turns.first_tile)
                    ds_row = (head_tiles * PLAN.strip_rows + in_strip * Q_TILES + tile) * PLAN.kv_tile
                _add_halves(
                    tiles, head_tiles + tile, ds_row, Order(counters + tile, rank, reached), shared, WRITER, PLAN
                )
            if PLAN.ordered:
                wait_for_additions()
                gl.atomic_add(counters + tile, 1, sem="release")
        steps_done += F.group * count
        if PLAN.results_by_tma:
            # Consumers hand dv and dk over like two more steps: dv to the writer of the first of these steps, dk to the
            # other writer.
            for half in gl.static_range(2):
                keys_at = [batch, kv_head, key_tile * PLAN.kv_tile + half * 64, 0]
                sync_at("dq_full", 2 * half + WRITER, PLAN)
                fence_async_shared()
                if steps_done % 2 == WRITER:
                    _store_result(tiles.dv, keys_at, shared, half, TYPE, F.padded_value_dim)
                else:
                    _store_result(tiles.dk, keys_at, shared, half, TYPE, F.padded_head_dim)
            _free_halves(PLAN)
        turns_done += 1
        turn = next_turn(shared, turns_done, 1)
    wait_for_additions()


@gluon.jit
def _add_halves(tiles, tile, ds_row, order, shared, WRITER: gl.constexpr, PLAN: gl.constexpr):
    """Adds both squares of a dq tile, one from each consumer, to memory, when it is this turn's time.

    In a launch for a strip, the writer also stores ds, which the consumers have written before dq. TMA operations
    finish reading in the order they were issued, and ds is issued before both squares of dq. So when both places of dq
    are free, ds has been read. A consumer overwrites the stage of ds two steps later; in the step between, it has
    waited for its place of dq.
    """
    BOTH: gl.constexpr = PLAN.ordered or PLAN.strip_rows > 0
    if BOTH:
        for half in gl.static_range(2):
            sync_at("dq_full", 2 * half + WRITER, PLAN)
        fence_async_shared()
    if PLAN.strip_rows:
        store(tiles.ds, [ds_row, 0], shared.ds.index(WRITER))
    if PLAN.ordered:
        _wait_for_turn(order)
    for half in gl.static_range(2):
        if not BOTH:
            sync_at("dq_full", 2 * half + WRITER, PLAN)
            fence_async_shared()
        _add_square(tiles.dq, (tile * 2 + half) * 16, shared.dq.index(half), order.rank, PLAN)
    _free_halves(PLAN)


@gluon.jit
def _free_halves(PLAN: gl.constexpr):
    """Frees the places of dq of both consumers, in the order in which TMA finishes reading them."""
    for half in gl.static_range(2):
        tma.store_wait(1 - half)  # at most the other place is still read
        arrive_at("dq_empty", half, PLAN)


@gluon.jit
def _add_wide_squares(dq, tile, order, shared, WRITER: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr):
    """Adds the three or four squares of a dq tile, for heads of more than 128, when it is this turn's time.

    The first consumer hands over squares 0 and 1 together, in places 0 and 2. The second hands over squares 2 and 3,
    one after the other, in place 1. Unless `PLAN.ordered`, it is always this turn's time.
    """
    SQUARES: gl.constexpr = PLAN.squares(F.head_dim)
    row = tile * SQUARES * 16
    for number in gl.static_range(2, SQUARES):
        sync_at("dq_full", 2 + WRITER, PLAN)
        if number == 2:
            _wait_for_turn(order)
        _add_square(dq, row + number * 16, shared.dq.index(1), order.rank, PLAN)
        tma.store_wait(0)
        arrive_at("dq_empty", 1, PLAN)
        if number == 2:
            sync_at("dq_full", WRITER, PLAN)
            _add_square(dq, row, shared.dq.index(0), order.rank, PLAN)
            _add_square(dq, row + 16, shared.dq.index(2), order.rank, PLAN)
            tma.store_wait(0)
            arrive_at("dq_empty", 0, PLAN)


@gluon.jit
def _wait_for_turn(order):
    reached = order.reached
    while reached < order.rank:
        reached = gl.load(order.counter, volatile=True)


@gluon.jit
def _add_square(dq, row, place, rank, PLAN: gl.constexpr):
    """Begins to add a square, 16 rows of `dq`, to memory. If `PLAN.ordered`, a tile's first turn overwrites memory."""
    if PLAN.ordered and rank == 0:
        store(dq, [row, 0], place)
    else:
        async_atomic_add(dq, [row, 0], place)


@gluon.jit
def _store_result(tiles, keys_at, shared, CONSUMER: gl.constexpr, TYPE: gl.constexpr, DIM: gl.constexpr):
    """Begins to write to memory the 64 rows of dk or dv that a consumer has handed over (`result_place`)."""
    store(tiles, keys_at, result_place(shared, CONSUMER, TYPE, DIM).reshape((1, 1, 64, DIM)))
