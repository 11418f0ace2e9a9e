# SPDX-License-Identifier: Apache-2.0
"""The three single warps of a one-pass backward program: one takes turns and fetches tiles, two add dq to memory."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..kernels.tile_loop import owned
from .backward_memory import barrier, first_place, next_turn, result_place, wait_for_room, write
from .backward_turns import next_step, rank_of, steps_of, take_turn, tile_at
from .bias_tiles import bias_group_of
from .hardware_barriers import arrive_at, sync_at
from .head_tiles import fetch_heads, padded_size, stage_of
from .workarounds import async_atomic_add, fetch, store, wait_for_additions


class BackwardTiles(NamedTuple):
    """TMA descriptors of the tiles in global memory that a program fetches and writes.

    A tile of `dq` is one piece, in the order of `dq_order`. `of_queries` is used if `PLAN.of_queries` has any kinds,
    and `dk` and `dv` if `PLAN.results_by_tma`. `bias` is 0 in a call without a bias, and `ds` is 0 in a
    launch that stores no ds.
    """

    k: Any
    v: Any
    q: Any
    dout: Any
    lse: Any
    delta: Any
    of_queries: Any
    dq: Any
    dk: Any
    dv: Any
    bias: Any
    ds: Any


@gluon.constexpr_function
def by_batch(F):
    """Whether the numbers of `PLAN.of_queries` (positions, segment ids) differ between batch rows."""
    ranges = F.q_first_batch > 0 or F.q_last_batch > 0
    return ranges or F.segments or (F.distances and F.q_positions_batch > 0)


@gluon.jit
def fetch_tiles(shared, tiles, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The code of the fetching warp: takes turns and fetches their keys, values and visited query tiles.

    The next turn is taken only when all fetches of this turn have begun, so that no turn waits long for a busy program.
    The keys of a turn arrive at the barrier of its first queries, the values at that of its first dout. They are
    fetched after these queries and dout, when the previous turn no longer needs its own keys and values.
    """
    DIM: gl.constexpr = padded_size(F.head_dim)
    VALUE_DIM: gl.constexpr = padded_size(F.value_dim)
    NUMBERS: gl.constexpr = PLAN.q_tile * 4
    TO_SUBTRACT: gl.constexpr = PLAN.q_tile * 32 if PLAN.subtracting else NUMBERS
    places = shared.parts if PLAN.subtracting else shared.rows
    taken = 0
    done = 0
    emptied = 0  # the number of steps whose place of dout this warp knows to be empty
    turn = take_turn(turns, T, PLAN)
    while turn < turns.count:
        row, batch, kv_head = owned(turn, T, F.kv_heads)
        steps = steps_of(turn, row, batch, kv_head, turns, T, PLAN)
        _announce(shared, taken, turn, steps.before, steps.whole, steps.after)
        count = steps.before + steps.whole + steps.after
        step = 0
        member = 0
        ahead = tile_at(steps, 0, T, PLAN)
        for number in range(0, F.group * count):
            head = kv_head * F.group + member
            tile = ahead
            step, member = next_step(step, member, count, F, PLAN)
            ahead = tile_at(steps, step, T, PLAN)
            begins = number == 0
            place = done % PLAN.stages
            first = batch * F.q_length + tile * PLAN.q_tile
            numbers_at = [batch * F.heads + head, tile * PLAN.q_tile]
            if PLAN.subtracting:
                numbers_at = [((batch * F.heads + head) * T.columns + tile) * PLAN.q_tile, 0]
            q_full = shared.q_full.index(place)
            if done >= PLAN.stages:
                sync_at("q_empty", place, PLAN)
            write(shared, "tile", place, tile)
            OF_BIAS: gl.constexpr = PLAN.q_tile * PLAN.kv_tile * 2 if F.bias else 0
            KINDS: gl.constexpr = len(PLAN.of_queries)
            OF_Q: gl.constexpr = PLAN.q_tile * DIM * 2 + TO_SUBTRACT + NUMBERS * KINDS + OF_BIAS
            _expect(q_full, OF_Q, PLAN.kv_tile * DIM * 2, begins)
            fetch_heads(tiles.q, head, first, q_full, stage_of(shared.q, place))
            fetch(tiles.lse, numbers_at, q_full, places.index(place))
            for kind in gl.static_range(KINDS):
                numbers = shared.rows.index(first_place(PLAN.of_queries[kind], PLAN) + place)
                line = _line_of(batch, head, F) * KINDS + kind
                fetch(tiles.of_queries, [line, tile * PLAN.q_tile], q_full, numbers)
            if F.bias:
                bias_at = [bias_group_of(batch, head, F), tile * PLAN.q_tile, row * PLAN.kv_tile]
                fetch(tiles.bias, bias_at, q_full, shared.bias.index(place).reshape((1, PLAN.q_tile, PLAN.kv_tile)))
            place = done % PLAN.dout_stages
            dout_full = barrier(shared, "dout_full", place)
            if emptied + PLAN.dout_stages <= done:
                sync_at("dout_empty", place, PLAN)
                emptied += 1
            _expect(dout_full, PLAN.q_tile * VALUE_DIM * 2 + TO_SUBTRACT, PLAN.kv_tile * VALUE_DIM * 2, begins)
            fetch_heads(tiles.dout, head, first, dout_full, stage_of(shared.dout, PLAN.dout_first + place))
            fetch(tiles.delta, numbers_at, dout_full, places.index(PLAN.stages + place))
            if begins:
                if PLAN.wide:
                    wait_for_room(shared, "kv_empty", taken, 1)
                else:  # a consumer that is done with a turn's last dout is done with its keys too
                    if emptied < done:
                        sync_at("dout_empty", (done - 1) % PLAN.dout_stages, PLAN)
                        emptied += 1
                first = batch * F.kv_length + row * PLAN.kv_tile
                fetch_heads(tiles.k, kv_head, first, q_full, stage_of(shared.k, 0))
                fetch_heads(tiles.v, kv_head, first, dout_full, stage_of(shared.v, PLAN.v_first))
            done += 1
        taken += 1
        turn = take_turn(turns, T, PLAN)
    _announce(shared, taken, turn, 0, 0, 0)


@gluon.jit
def _line_of(batch, head, F: gl.constexpr):
    """The number of a head's numbers among those of all batch rows and heads that differ."""
    line = batch if by_batch(F) else 0
    if F.ranges_by_head:
        line = line * F.heads + head
    return line


@gluon.jit
def _expect(full, BYTES: gl.constexpr, MORE: gl.constexpr, more):
    """Tells barrier `full` how many bytes will arrive: `BYTES`, or `BYTES + MORE` if `more` (a turn's first step)."""
    if more:
        mbarrier.expect(full, BYTES + MORE)
    else:
        mbarrier.expect(full, BYTES)


@gluon.jit
def _announce(shared, taken, turn, before, whole, after):
    """Tells the other warps the next turn and its numbers of steps, once those are done with the turn before last."""
    place = taken % 2
    wait_for_room(shared, "turn_empty", taken, 2)
    write(shared, "turn", place, turn)
    write(shared, "before", place, before)
    write(shared, "whole", place, whole)
    write(shared, "after", place, after)
    mbarrier.arrive(barrier(shared, "turn_full", place), count=1)


@gluon.jit
def add_dq(NUMBER: gl.constexpr, shared, tiles, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The code of writer `NUMBER`: adds the pieces of each dq tile to memory as the consumers compute them.

    The two writers take alternate steps. Where the plan is `ordered`, a query tile has a counter of the turns that have
    added to it. A turn waits until the counter equals its rank among the turns that visit the tile, and raises the
    counter when its addition has reached memory. This takes about as long as a step: one writer alone would hold the
    consumers up. The counter must be raised with release semantics: without it, bits differed in 5 of 20 runs.

    No turn waits for ever: ranks follow the order in which turns are taken, so that a turn waits only for turns that a
    running program has taken before. Of those not done, the first waits for none, except for a while in `take_turn`.
    """
    Q_TILES: gl.constexpr = T.columns
    TYPE: gl.constexpr = shared.q[0].dtype
    if NUMBER == 0:  # at first all places are empty
        arrive_at("dq_empty", 0, PLAN)
        arrive_at("dq_empty", 1, PLAN)
    done = 0
    taken = 0
    turn = next_turn(shared, taken, 1)
    while turn < turns.count:
        row, batch, kv_head = owned(turn, T, F.kv_heads)
        mbarrier.arrive(barrier(shared, "turn_empty", taken % 2), count=1)
        steps = steps_of(turn, row, batch, kv_head, turns, T, PLAN)
        count = steps.before + steps.whole + steps.after
        step = 0
        member = 0
        start = (done + NUMBER) % 2
        if start == 1:
            step, member = next_step(step, member, count, F, PLAN)
        ahead = tile_at(steps, step, T, PLAN)
        for _ in range(start, F.group * count, 2):
            tile = ahead
            first = (batch * F.heads + kv_head * F.group + member) * Q_TILES
            counters = turns.counters + 1 + first
            step, member = next_step(step, member, count, F, PLAN)
            step, member = next_step(step, member, count, F, PLAN)
            ahead = tile_at(steps, step, T, PLAN)
            rank = 0
            reached = 0
            if PLAN.ordered:
                rank = rank_of(tile, turn, row, batch, kv_head, turns, T, PLAN)
                reached = gl.load(counters + tile, volatile=True)
            if PLAN.wide:
                _add_wide_pieces(tiles.dq, first + tile, counters + tile, rank, reached, shared, NUMBER, F, PLAN)
            else:
                ds_row = 0
                if PLAN.strip_rows:
                    in_strip = row - gl.load(turns.first_tile)
                    ds_row = (first * PLAN.strip_rows + in_strip * Q_TILES + tile) * PLAN.kv_tile
                _add_halves(tiles, first + tile, ds_row, counters + tile, rank, reached, shared, NUMBER, PLAN)
            if PLAN.ordered:
                wait_for_additions()
                gl.atomic_add(counters + tile, 1, sem="release")
        done += F.group * count
        if PLAN.results_by_tma:
            # Consumers hand dv and dk over like two more steps: dv to the writer of the first of these steps, dk to the
            # other writer.
            for half in gl.static_range(2):
                keys_at = [batch, kv_head, row * PLAN.kv_tile + half * 64, 0]
                sync_at("dq_full", 2 * half + NUMBER, PLAN)
                fence_async_shared()
                if done % 2 == NUMBER:
                    _store_result(tiles.dv, keys_at, shared, half, TYPE, F.padded_value_dim)
                else:
                    _store_result(tiles.dk, keys_at, shared, half, TYPE, F.padded_head_dim)
            for half in gl.static_range(2):
                tma.store_wait(1 - half)
                arrive_at("dq_empty", half, PLAN)
        taken += 1
        turn = next_turn(shared, taken, 1)
    wait_for_additions()


@gluon.jit
def _add_halves(tiles, tile, ds_row, counter, rank, reached, shared, NUMBER: gl.constexpr, PLAN: gl.constexpr):
    """Adds both halves of a dq tile, one from each consumer, to memory, when it is this turn's time.

    In a launch for a strip, the writer also stores ds, which the consumers have written before dq. TMA operations
    finish reading in the order they were issued, and ds is issued before both halves of dq. So when both places of dq
    are free, ds has been read. A consumer overwrites the place of ds two steps later; in the step between, it has
    waited for its place of dq.
    """
    BOTH: gl.constexpr = PLAN.ordered or PLAN.strip_rows > 0
    if BOTH:
        for half in gl.static_range(2):
            sync_at("dq_full", 2 * half + NUMBER, PLAN)
        fence_async_shared()
    if PLAN.strip_rows:
        store(tiles.ds, [ds_row, 0], shared.ds.index(NUMBER))
    if PLAN.ordered:
        while reached < rank:
            reached = gl.load(counter, volatile=True)
    for half in gl.static_range(2):
        if not BOTH:
            sync_at("dq_full", 2 * half + NUMBER, PLAN)
            fence_async_shared()
        _add_piece(tiles.dq, (tile * 2 + half) * 16, shared.dq.index(half), rank, PLAN)
    for half in gl.static_range(2):
        tma.store_wait(1 - half)
        arrive_at("dq_empty", half, PLAN)


@gluon.jit
def _add_wide_pieces(
    dq, tile, counter, rank, reached, shared, NUMBER: gl.constexpr, F: gl.constexpr, PLAN: gl.constexpr
):
    """Adds the pieces of a dq tile, for heads of more than 128, to memory, when it is this turn's time.

    The first consumer hands over its two pieces together, in places 0 and 2. The second hands over one or two pieces,
    one after the other, in place 1.
    """
    PIECES: gl.constexpr = PLAN.pieces(F.head_dim)
    to = tile * PIECES * 16
    for piece in gl.static_range(PIECES // 2):
        sync_at("dq_full", 2 + NUMBER, PLAN)
        if piece == 0:
            while reached < rank:
                reached = gl.load(counter, volatile=True)
        _add_piece(dq, to + (PIECES - PIECES // 2 + piece) * 16, shared.dq.index(1), rank, PLAN)
        tma.store_wait(0)
        arrive_at("dq_empty", 1, PLAN)
        if piece == 0:
            sync_at("dq_full", NUMBER, PLAN)
            _add_piece(dq, to, shared.dq.index(0), rank, PLAN)
            _add_piece(dq, to + 16, shared.dq.index(2), rank, PLAN)
            tma.store_wait(0)
            arrive_at("dq_empty", 0, PLAN)


@gluon.jit
def _add_piece(dq, row, piece, rank, PLAN: gl.constexpr):
    """Begins to add a piece of dq to memory. If `PLAN.ordered`, a tile's first turn (`rank` 0) overwrites memory."""
    if PLAN.ordered and rank == 0:
        store(dq, [row, 0], piece)
    else:
        async_atomic_add(dq, [row, 0], piece)


@gluon.jit
def _store_result(tiles, keys_at, shared, NUMBER: gl.constexpr, TYPE: gl.constexpr, DIM: gl.constexpr):
    """Begins to write to memory the 64 rows of dk or dv that consumer `NUMBER` has handed over (`result_place`)."""
    store(tiles, keys_at, result_place(shared, NUMBER, TYPE, DIM).reshape((1, 1, 64, DIM)))
