# SPDX-License-Identifier: Apache-2.0
"""The producer of a forward program on Hopper: one warp that takes turns, fetches tiles by TMA and stores results."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..kernels.tile_loop import masked_tile, owned, visit, whole_tile
from .forward_positions import load_key_offsets, offsets_stage, origin_of
from .hardware_barriers import read_number, sync_at, wait_until_full, write_number
from .head_tiles import (
    fetch_heads,
    fetch_piece,
    in_two_pieces,
    padded_size,
    shared_group,
    stage_of,
    stored_width,
    tiles_of_bias,
    tiles_of_heads,
    tiles_of_results,
)
from .layouts import CONSUMER_ROWS
from .workarounds import fetch, store


class ForwardMemory(NamedTuple):
    """The shared memory through which the producer feeds the consumers.

    `x_full` are barriers (the table in `forward_kernel`). `q`, `k` and `v` are tuples with an allocation for each piece
    of a head (`head_tiles`). The bias of a tile, and the key offsets, arrive with its keys.
    """

    q: Any
    q_full: Any
    k: Any
    k_full: Any
    tiles: Any  # the number of the key tile in each stage of keys
    bias: Any  # used if the call has a bias
    v: Any
    v_full: Any
    rest_full: Any
    turns: Any  # the five numbers of each of two turns (`read`)
    turn_full: Any
    key_offsets: Any  # used if the call has ALiBi (`forward_positions`)


class ForwardTiles(NamedTuple):
    """TMA descriptors of tiles in global memory; 0 where a call or plan does not use them."""

    q: Any
    k: Any
    v: Any
    bias: Any
    out: Any


class Turns(NamedTuple):
    """The turns of a launch: two arrays of a `visited_tiles.Table`, the counter of turns taken, and how many there
    are."""

    bounds: Any
    tiles: Any
    counter: Any
    count: Any


class Turn(NamedTuple):
    """A turn: the number of its query tile, its batch row and head, and the key tiles that it visits."""

    query_tile: Any
    batch: Any
    head: Any
    visited: Any


class KeysOfTurn(NamedTuple):
    """What a turn's key tiles have in common."""

    query_tile: Any
    batch: Any
    kv_head: Any
    bias_group: Any
    origin: Any  # of positions for ALiBi (`forward_positions`)


class Fetched(NamedTuple):
    """How many key tiles a program has fetched, and which values are to be fetched next: those of the last key tile."""

    count: Any
    token: Any  # the first, counted over all batch rows
    kv_head: Any


@gluon.jit
def produce(shared, ARRAYS, P, turns, F: gl.constexpr, T: gl.constexpr, BATCH: gl.constexpr, PLAN: gl.constexpr):
    """The code of the producer: takes turns, fetches their tiles and stores their results.

    For each turn that has tiles:
    1. It waits until the consumers have finished the turn before the previous one, unless step 6 did so, and begins to
       store the results of that turn.
    2. It announces the turn to the consumers, and fetches its queries, if these have two stages. Otherwise it fetches
       them after the turn's first tile, consumer by consumer, and waits for each until its last scores of the turn
       before are computed.
    3. It fetches the tiles that need a mask: the keys of each tile, and then the values of the tile before, which may
       be the last of the previous turn.
    4. It takes the next turn, and looks up which tiles that turn visits.
    5. It fetches the tiles that need no mask in the same way.
    6. If `PLAN.results_by_tma`, then after the third tile of step 5 it waits until the consumers have finished the
       previous turn, which they do in their first step of this turn, and begins to store the results of that turn.

    The first turn comes from the counter too: a program that starts late then does not hold back a long turn.
    """
    number = gl.atomic_add(turns.counter, 1, sem="relaxed")
    turn = _turn_of(number, turns, F, T)
    ahead = masked_tile(turn.visited, 0, T)
    tiles = _tiles(ARRAYS, P, F, BATCH, PLAN)
    announced = 0
    fetched = Fetched(0, 0, 0)
    released = 0
    while number < turns.count:
        visited = turn.visited
        masked = visited.masked
        whole = visited.whole_to - visited.whole_from
        if PLAN.fresh:
            # A turn that sees nothing gets one tile, in which all pairs are masked out, so that its zeros are written.
            # Where a partial result is continued, it lies in the output already.
            nothing = masked + whole == 0
            masked = gl.where(nothing, 1, masked)
            ahead = gl.where(nothing, 0, ahead)
        if masked + whole > 0:
            _begin_turn(shared, tiles, turn, announced, released, masked, whole, F, PLAN)
            released = 0
            announced += 1
        kv_head = turn.head // F.group
        bias_group = shared_group(turn.batch, turn.head, F.bias_batch, F.bias_head, F.heads)
        origin = origin_of(P, turn.batch, turn.query_tile * PLAN.q_tile, F)
        keys = KeysOfTurn(turn.query_tile, turn.batch, kv_head, bias_group, origin)
        for step in range(0, masked):
            tile = ahead
            ahead = masked_tile(visited, step + 1, T)
            fetched = _fetch_tile(shared, tiles, P, keys, tile, fetched, F, PLAN)
            if PLAN.q_stages == 1 and step == 0:
                _fetch_queries(shared, tiles, turn, announced - 1, F, PLAN)
        # The next turn is looked up while consumers have tiles to work on.
        number = gl.atomic_add(turns.counter, 1, sem="relaxed")
        following = _turn_of(number, turns, F, T)
        ahead = whole_tile(visited, visited.whole_from, T)
        for step in range(visited.whole_from, visited.whole_to):
            tile = ahead
            ahead = whole_tile(visited, step + 1, T)
            fetched = _fetch_tile(shared, tiles, P, keys, tile, fetched, F, PLAN)
            if PLAN.q_stages == 1 and masked == 0 and step == visited.whole_from:
                _fetch_queries(shared, tiles, turn, announced - 1, F, PLAN)
            # After the third tile this wait is short. Before the first tile it would never end.
            if PLAN.results_by_tma and step == visited.whole_from + 2 and announced > 1:
                _release(shared, announced % 2, tiles, PLAN)
                released = 1
        turn = following
        ahead = masked_tile(turn.visited, 0, T)
    if fetched.count > 0:
        _fetch_values(shared, tiles, fetched, F, PLAN)
    if announced > 1 and released == 0:
        _release(shared, announced % 2, tiles, PLAN)
    _announce(shared, announced, (-1, 0, 0, 0, 0))
    if PLAN.results_by_tma:
        if announced > 0:
            _release(shared, (announced + 1) % 2, tiles, PLAN)
        tma.store_wait(0)


@gluon.jit
def _tiles(ARRAYS, P, F: gl.constexpr, BATCH: gl.constexpr, PLAN: gl.constexpr):
    """The `ForwardTiles` of a launch."""
    Q, K, V, OUT = ARRAYS
    KV_ROWS: gl.constexpr = BATCH * F.kv_length
    Q_TOKEN: gl.constexpr = F.heads * F.head_dim
    q = tiles_of_heads(Q, F.heads, BATCH * F.q_length, F.head_dim, F.head_dim, Q_TOKEN, CONSUMER_ROWS)
    k = tiles_of_heads(K, F.kv_heads, KV_ROWS, F.head_dim, F.k_head, F.k_token, PLAN.kv_tile)
    v = tiles_of_heads(V + F.v_start, F.kv_heads, KV_ROWS, F.value_dim, F.v_head, F.v_token, PLAN.kv_tile)
    bias = tiles_of_bias(P.bias, BATCH, F, CONSUMER_ROWS, PLAN.kv_tile) if F.bias else 0
    out = tiles_of_results(OUT, BATCH, F.q_length, F.heads, F.value_dim) if PLAN.results_by_tma else 0
    return ForwardTiles(q, k, v, bias, out)


@gluon.jit
def _turn_of(number, turns, F: gl.constexpr, T: gl.constexpr):
    """The `Turn` with number `number`; from number `turns.count` on, the last turn.

    The first turns are the last query tiles, which see most keys under a causal mask.
    """
    from_end, batch, head = owned(gl.minimum(number, turns.count - 1), T, F.heads)
    query_tile = T.rows - 1 - from_end
    return Turn(query_tile, batch, head, visit(turns.bounds, turns.tiles, batch, head // F.group, query_tile, T))


@gluon.jit
def _begin_turn(shared, tiles, turn, number, released, masked, whole, F: gl.constexpr, PLAN: gl.constexpr):
    """Steps 1 and 2 of `produce` for `turn`, number `number` of this program. `released`: step 6 was done before."""
    first_query = turn.query_tile * PLAN.q_tile
    if number > 1 and released == 0:
        _release(shared, number % 2, tiles, PLAN)
    _announce(shared, number, (first_query, turn.batch, turn.head, masked, whole))
    if PLAN.q_stages == 2:
        _fetch_queries(shared, tiles, turn, number, F, PLAN)


@gluon.jit
def _fetch_queries(shared, tiles, turn, number, F: gl.constexpr, PLAN: gl.constexpr):
    """Fetches the queries of `turn`, number `number` of this program, into the stage of each consumer."""
    CONSUMERS: gl.constexpr = PLAN.consumers
    if PLAN.results_by_tma:
        tma.store_wait(0)  # until the results that lay in the stages have been read
    token = turn.query_tile * PLAN.q_tile + turn.batch * F.q_length
    for consumer in gl.static_range(CONSUMERS):
        stage = number % PLAN.q_stages * CONSUMERS + consumer
        if PLAN.q_stages == 1 and number > 0:
            sync_at("q_empty", consumer, PLAN)
        full = shared.q_full.index(stage)
        mbarrier.expect(full, CONSUMER_ROWS * padded_size(F.head_dim) * 2)
        fetch_heads(tiles.q, turn.head, token + consumer * CONSUMER_ROWS, full, stage_of(shared.q, stage))


@gluon.jit
def _release(shared, stage, tiles, PLAN: gl.constexpr):
    """Waits until all consumers have finished the turn in `stage`; if `PLAN.results_by_tma`, begins to store its
    results.

    Turn `n` of a program has stage `n % 2`. The results lie where the queries were.
    """
    sync_at("turn_done", stage, PLAN)
    if PLAN.results_by_tma:
        CONSUMERS: gl.constexpr = PLAN.consumers
        first_query = read(shared, "first_query", stage, 1)
        batch = read(shared, "batch", stage, 1)
        head = read(shared, "head", stage, 1)
        for consumer in gl.static_range(CONSUMERS):
            at = [batch, head, first_query + consumer * CONSUMER_ROWS, 0]
            own = shared.q[0].index(stage * CONSUMERS + consumer)
            store(tiles.out, at, own.reshape((1, 1, CONSUMER_ROWS, shared.q[0].shape[2])))


@gluon.jit
def _announce(shared, number, numbers):
    """Writes the five numbers of turn `number` of this program to shared memory, and tells the consumers.

    There are two stages for turns: all consumers must have finished turn `number - 2`.
    """
    stage = number % 2
    for index in gl.static_range(5):
        write_number(shared.turns.index(stage * 5 + index), numbers[index])
    mbarrier.arrive(shared.turn_full.index(stage), count=1)


@gluon.jit
def _fetch_tile(shared, tiles, P, keys, tile, fetched, F: gl.constexpr, PLAN: gl.constexpr):
    """Fetches the keys and bias of key tile `tile`, then the values of the previous tile. Returns the new `Fetched`.

    The values of a tile are needed one step after its keys, and their stage becomes empty one step later. If values
    were fetched before the next keys, these keys would come late, above all the first keys of a turn.
    """
    CONSUMERS: gl.constexpr = PLAN.consumers
    stage = fetched.count % PLAN.kv_stages
    token = keys.batch * F.kv_length + tile * PLAN.kv_tile
    k_full = shared.k_full.index(stage)
    if F.slopes:
        column = tile * PLAN.kv_tile + gl.arange(
            0, PLAN.kv_tile, gl.BlockedLayout([PLAN.kv_tile // 32], [32], [1], [0])
        )
        offsets = load_key_offsets(P, keys.batch, column, keys.origin, F, PLAN.kv_tile)
    if fetched.count >= PLAN.kv_stages:
        sync_at("k_empty", stage, PLAN)
    if F.slopes:
        offsets_stage(shared, fetched.count, PLAN).store(offsets)
    write_number(shared.tiles.index(stage), tile)
    OF_BIAS: gl.constexpr = PLAN.q_tile * PLAN.kv_tile * 2 if F.bias else 0
    mbarrier.expect(k_full, PLAN.kv_tile * padded_size(F.head_dim) * 2 + OF_BIAS)
    fetch_heads(tiles.k, keys.kv_head, token, k_full, stage_of(shared.k, stage))
    if F.bias:
        for consumer in gl.static_range(CONSUMERS):
            own = shared.bias.index(stage * CONSUMERS + consumer).reshape((1, CONSUMER_ROWS, PLAN.kv_tile))
            query = keys.query_tile * PLAN.q_tile + consumer * CONSUMER_ROWS
            fetch(tiles.bias, [keys.bias_group, query, tile * PLAN.kv_tile], k_full, own)
    if fetched.count > 0:
        _fetch_values(shared, tiles, fetched, F, PLAN)
    return Fetched(fetched.count + 1, token, keys.kv_head)


@gluon.jit
def _fetch_values(shared, tiles, fetched, F: gl.constexpr, PLAN: gl.constexpr):
    """Begins to fetch the values of the key tile whose keys were fetched last (`fetched`)."""
    step = fetched.count - 1
    stage = step % PLAN.kv_stages
    v_full = shared.v_full.index(stage)
    if step >= PLAN.kv_stages:
        sync_at("v_empty", stage, PLAN)
    mbarrier.expect(v_full, PLAN.kv_tile * stored_width(F.value_dim, 0) * 2)
    fetch_piece(tiles.v, fetched.kv_head, fetched.token, v_full, shared.v[0].index(stage), 0)
    if in_two_pieces(F.value_dim):
        rest_full = shared.rest_full.index(0)
        if step >= 1:
            sync_at("rest_empty", 0, PLAN)
        mbarrier.expect(rest_full, PLAN.kv_tile * stored_width(F.value_dim, 1) * 2)
        fetch_piece(tiles.v, fetched.kv_head, fetched.token, rest_full, shared.v[1].index(0), 1)


@gluon.jit
def next_first_query(shared, turns_done):
    """Called by a consumer: waits for turn `turns_done` of this program. Returns its first query; -1: none is left."""
    wait_until_full(shared.turn_full, turns_done, 2)
    return read(shared, "first_query", turns_done % 2)


@gluon.jit
def read(shared, NAME: gl.constexpr, stage, WARPS: gl.constexpr = 4):
    """Reads a number of the turn in `stage`, in a partition of `WARPS` warps.

    It is the first query, the batch row, the head, or how many tiles of keys are masked or whole.
    """
    return read_number(shared.turns.index(stage * 5 + _index(NAME)), WARPS)


@gluon.constexpr_function
def _index(NAME):
    return {"first_query": 0, "batch": 1, "head": 2, "masked": 3, "whole": 4}[NAME]
