# SPDX-License-Identifier: Apache-2.0
"""The producer of a forward program on Hopper: one warp that takes turns, fetches tiles by TMA and stores results."""

from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..kernels.tile_loop import masked_tile, owned, visit, whole_tile
from .bias_tiles import bias_group_of, tiles_of_bias
from .forward_positions import load_key_offsets, offsets_stage, origin_of
from .hardware_barriers import read_number, sync_at, wait_until_full, write_number
from .head_tiles import (
    fetch_heads,
    fetch_piece,
    in_two_pieces,
    padded_size,
    stage_of,
    stored_width,
    tiles_of_heads,
    tiles_of_results,
)
from .plans import CONSUMER_ROWS
from .workarounds import fetch, store

_NUMBERS: Final = {"first": 0, "batch": 1, "head": 2, "masked": 3, "whole": 4}
"""The numbers of a turn in `ForwardMemory.turns`: its first query, its batch row and head, the number of key tiles that
need a mask, and the number of key tiles that need none."""


class ForwardMemory(NamedTuple):
    """The shared memory through which the producer feeds the consumers.

    `x_full` are the barriers that say that a place of `x` is filled; `ForwardPlan.hardware_barriers` say that a place
    is empty. `q`, `k` and `v` are tuples with an allocation for each piece of a head (`head_tiles`); `rest_full` is for
    the only place of the second piece of values. `tiles` holds the number of the key tile in each place. The `bias` of
    a tile, and the key `positions` for ALiBi, arrive with its keys. `turns` has five numbers for a turn: its first
    query, its batch row, its head, the number of key tiles that need a mask, and the number of key tiles that need
    none.
    """

    q: Any
    q_full: Any
    k: Any
    k_full: Any
    tiles: Any
    bias: Any
    v: Any
    v_full: Any
    rest_full: Any
    turns: Any
    turns_full: Any
    positions: Any


class ForwardTiles(NamedTuple):
    """TMA descriptors of tiles of queries, keys, values, bias and results.

    `bias` in a call without a bias, and `out` in a plan whose results are not `results_by_tma`, are copies of `q` and
    not used.
    """

    q: Any
    k: Any
    v: Any
    bias: Any
    out: Any


class Turn(NamedTuple):
    """A turn, the work on one query tile: the tile's number `row`, batch row and head, and the key tiles it visits."""

    row: Any
    batch: Any
    head: Any
    visited: Any


class Fetched(NamedTuple):
    """How many key tiles a program has fetched (`count`), and which values are to be fetched next.

    These are the values of the last key tile: `row` is their first token, over all batch rows, and `head` the key head.
    """

    count: Any
    row: Any
    head: Any


@gluon.jit
def produce(
    shared, ARRAYS, P, BOUNDS, TILES, TAKEN, all_turns, F: gl.constexpr, T: gl.constexpr, BATCH: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """The code of the producer: takes turns from the counter `TAKEN`, fetches their tiles and stores their results.

    For each turn that has tiles:
    1. It waits until the consumers have finished the turn before the previous one, unless step 6 did so, and begins to
       store the results of that turn.
    2. It announces the turn to the consumers, and fetches its queries.
    3. It fetches the tiles that need a mask: the keys of each tile, and then the values of the tile before, which may
       be the last of the previous turn.
    4. It takes the next turn, and looks up which tiles that turn visits.
    5. It fetches the tiles that need no mask in the same way.
    6. If results are `PLAN.results_by_tma`, then after the third tile of step 5 it waits until the consumers have
       finished the previous turn, which they do in their first step of this turn, and begins to store the results of
       that turn.

    The first turn comes from the counter too: a program that starts late then does not hold back a long turn.
    """
    number = gl.atomic_add(TAKEN, 1, sem="relaxed")
    turn = _turn_of(number, all_turns, BOUNDS, TILES, F, T)
    ahead = masked_tile(turn.visited, 0, T)
    tiles = _tiles(ARRAYS, P, F, BATCH, PLAN)
    announced = 0
    fetched = Fetched(0, 0, 0)
    released = 0
    while number < all_turns:
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
        bias_group = bias_group_of(turn.batch, turn.head, F)
        origin = origin_of(P, turn.batch, turn.row * PLAN.q_tile, F)
        for step in range(0, masked):
            tile = ahead
            ahead = masked_tile(visited, step + 1, T)
            fetched = _fetch_tile(shared, tiles, P, turn, kv_head, bias_group, origin, tile, fetched, F, PLAN)
        # The next turn is looked up while consumers have tiles to work on.
        number = gl.atomic_add(TAKEN, 1, sem="relaxed")
        following = _turn_of(number, all_turns, BOUNDS, TILES, F, T)
        ahead = whole_tile(visited, visited.whole_from, T)
        for step in range(visited.whole_from, visited.whole_to):
            tile = ahead
            ahead = whole_tile(visited, step + 1, T)
            fetched = _fetch_tile(shared, tiles, P, turn, kv_head, bias_group, origin, tile, fetched, F, PLAN)
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
    _announce(shared, announced, -1, 0, 0, 0, 0)
    if PLAN.results_by_tma:
        if announced > 0:
            _release(shared, (announced + 1) % 2, tiles, PLAN)
        tma.store_wait(0)


@gluon.jit
def _tiles(ARRAYS, P, F: gl.constexpr, BATCH: gl.constexpr, PLAN: gl.constexpr):
    """The `ForwardTiles` of a launch."""
    Q, K, V, OUT = ARRAYS
    KV_ROWS: gl.constexpr = BATCH * F.kv_length
    q_tiles = tiles_of_heads(
        Q, F.heads, BATCH * F.q_length, F.head_dim, F.head_dim, F.heads * F.head_dim, CONSUMER_ROWS
    )
    k_tiles = tiles_of_heads(K, F.kv_heads, KV_ROWS, F.head_dim, F.k_head, F.k_token, PLAN.kv_tile)
    values = V + F.v_start
    v_tiles = tiles_of_heads(values, F.kv_heads, KV_ROWS, F.value_dim, F.v_head, F.v_token, PLAN.kv_tile)
    bias_tiles = q_tiles
    if F.bias:
        bias_tiles = tiles_of_bias(P.bias, BATCH, F, CONSUMER_ROWS, PLAN.kv_tile)
    out_tiles = q_tiles
    if PLAN.results_by_tma:
        out_tiles = tiles_of_results(OUT, BATCH, F.q_length, F.heads, F.value_dim)
    return ForwardTiles(q_tiles, k_tiles, v_tiles, bias_tiles, out_tiles)


@gluon.jit
def _turn_of(number, all_turns, BOUNDS, TILES, F: gl.constexpr, T: gl.constexpr):
    """The `Turn` with number `number`; from number `all_turns` on, the last turn.

    The first turns are the last query tiles, which see most keys under a causal mask.
    """
    before, batch, head = owned(gl.minimum(number, all_turns - 1), T, F.heads)
    row = T.rows - 1 - before
    return Turn(row, batch, head, visit(BOUNDS, TILES, batch, head // F.group, row, T))


@gluon.jit
def _begin_turn(shared, tiles, turn, number, released, masked, whole, F: gl.constexpr, PLAN: gl.constexpr):
    """Steps 1 and 2 of `produce` for `turn`, number `number` of this program. `released`: step 6 was done before."""
    CONSUMERS: gl.constexpr = PLAN.consumers
    first = turn.row * PLAN.q_tile
    if number > 1 and released == 0:
        _release(shared, number % 2, tiles, PLAN)
    _announce(shared, number, first, turn.batch, turn.head, masked, whole)
    place = number % PLAN.q_places
    full = shared.q_full.index(place)
    if PLAN.q_places == 1 and number > 0:
        sync_at("q_empty", 0, PLAN)
    if PLAN.results_by_tma:
        tma.store_wait(0)
    mbarrier.expect(full, PLAN.q_tile * padded_size(F.head_dim) * 2)
    first += turn.batch * F.q_length
    for consumer in gl.static_range(CONSUMERS):
        mine_from = first + consumer * CONSUMER_ROWS
        fetch_heads(tiles.q, turn.head, mine_from, full, stage_of(shared.q, place * CONSUMERS + consumer))


@gluon.jit
def _release(shared, place, tiles, PLAN: gl.constexpr):
    """Waits until all consumers have finished the turn in `place`; if `PLAN.results_by_tma`, begins to store its
    results.

    Turn `n` of a program has place `n % 2`. If queries have two places, the consumers are then done with the turn's
    queries too. The results lie where the queries were.
    """
    sync_at("turn_empty", place, PLAN)
    if PLAN.results_by_tma:
        CONSUMERS: gl.constexpr = PLAN.consumers
        first = read(shared, "first", place, 1)
        batch = read(shared, "batch", place, 1)
        head = read(shared, "head", place, 1)
        for number in gl.static_range(CONSUMERS):
            at = [batch, head, first + number * CONSUMER_ROWS, 0]
            mine = shared.q[0].index(place * CONSUMERS + number).reshape((1, 1, CONSUMER_ROWS, shared.q[0].shape[2]))
            store(tiles.out, at, mine)


@gluon.jit
def _announce(shared, number, first, batch, head, masked, whole):
    """Writes the `_NUMBERS` of turn `number` to shared memory, and tells the consumers.

    If `first` is -1, no turn is left. There are two places for turns: all consumers must have finished turn
    `number - 2`.
    """
    place = number % 2
    numbers = first, batch, head, masked, whole
    for index in gl.static_range(5):
        write_number(shared.turns.index(place * 5 + index), numbers[index])
    mbarrier.arrive(shared.turns_full.index(place), count=1)


@gluon.jit
def _fetch_tile(
    shared, tiles, P, turn, kv_head, bias_group, origin, tile, fetched, F: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Fetches the keys and bias of key tile `tile`, then the values of the previous tile. Returns the new `Fetched`.

    The values of a tile are needed one step after its keys, and their place becomes empty one step later. If values
    were fetched before the next keys, these keys would come late, above all the first keys of a turn.
    """
    CONSUMERS: gl.constexpr = PLAN.consumers
    place = fetched.count % PLAN.stages
    first = turn.batch * F.kv_length + tile * PLAN.kv_tile
    full = shared.k_full.index(place)
    away = load_key_offsets(P, turn.batch, tile, origin, F, PLAN.kv_tile)
    if fetched.count >= PLAN.stages:
        sync_at("k_empty", place, PLAN)
    if F.distances:
        offsets_stage(shared, fetched.count, PLAN).store(away)
    write_number(shared.tiles.index(place), tile)
    OF_BIAS: gl.constexpr = PLAN.q_tile * PLAN.kv_tile * 2 if F.bias else 0
    mbarrier.expect(full, PLAN.kv_tile * padded_size(F.head_dim) * 2 + OF_BIAS)
    fetch_heads(tiles.k, kv_head, first, full, stage_of(shared.k, place))
    if F.bias:
        for number in gl.static_range(CONSUMERS):
            mine = shared.bias.index(place * CONSUMERS + number).reshape((1, CONSUMER_ROWS, PLAN.kv_tile))
            row = turn.row * PLAN.q_tile + number * CONSUMER_ROWS
            fetch(tiles.bias, [bias_group, row, tile * PLAN.kv_tile], full, mine)
    if fetched.count > 0:
        _fetch_values(shared, tiles, fetched, F, PLAN)
    return Fetched(fetched.count + 1, first, kv_head)


@gluon.jit
def _fetch_values(shared, tiles, fetched, F: gl.constexpr, PLAN: gl.constexpr):
    """Begins to fetch the values of the key tile whose keys were fetched last (`fetched`)."""
    number = fetched.count - 1
    place = number % PLAN.stages
    full = shared.v_full.index(place)
    if number >= PLAN.stages:
        sync_at("v_empty", place, PLAN)
    mbarrier.expect(full, PLAN.kv_tile * stored_width(F.value_dim, 0) * 2)
    fetch_piece(tiles.v, fetched.head, fetched.row, full, shared.v[0].index(place), 0)
    if in_two_pieces(F.value_dim):
        full = shared.rest_full.index(0)
        if number >= 1:
            sync_at("rest_empty", 0, PLAN)
        mbarrier.expect(full, PLAN.kv_tile * stored_width(F.value_dim, 1) * 2)
        fetch_piece(tiles.v, fetched.head, fetched.row, full, shared.v[1].index(0), 1)


@gluon.jit
def next_turn(shared, done):
    """Called by a consumer: waits for turn number `done` of this program. Returns its first query; -1: none is left."""
    wait_until_full(shared.turns_full, done, 2)
    return read(shared, "first", done % 2)


@gluon.jit
def read(shared, NAME: gl.constexpr, place, WARPS: gl.constexpr = 4):
    """Reads the number `NAME` (`_NUMBERS`) of the turn in `place`, in a partition of `WARPS` warps."""
    return read_number(shared.turns.index(place * 5 + _index(NAME)), WARPS)


@gluon.constexpr_function
def _index(NAME):
    return _NUMBERS[NAME]
