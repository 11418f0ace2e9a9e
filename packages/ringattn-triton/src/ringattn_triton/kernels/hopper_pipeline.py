# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
"""How queries, keys and values come to the consumers of a program on Hopper: one warp takes turns and fetches."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..hopper import CONSUMED
from .tiles import full_tile, masked_tile, owned, visit

fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""As Triton 3.9 calls it, and as it was called before."""


class Shared(NamedTuple):
    """What passes from the producer to the consumers, in shared memory.

    Each place has a barrier that says it is `full`, which the producer or its fetches arrive at, and one that says it
    is `empty`, at which all consumers arrive. `tiles` are the numbers of the tiles of keys, and `bias`, if there is
    any, comes with those. Of a turn there are its number, and how many tiles it masks and sees whole. `order` lets one
    consumer multiply at a time.
    """

    q: Any
    q_full: Any
    q_empty: Any
    k: Any
    k_full: Any
    k_empty: Any
    tiles: Any
    bias: Any
    v: Any
    v_full: Any
    v_empty: Any
    turns: Any
    masked: Any
    whole: Any
    turns_full: Any
    turns_empty: Any
    order: Any


@gluon.jit
def begin(barriers, PLACES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that so many arrive at."""
    for place in gl.static_range(PLACES):
        mbarrier.init(barriers.index(place), count=ARRIVALS)


@gluon.jit
def produce(
    shared, q_tiles, k_tiles, v_tiles, bias_tiles, TABLE, TILES, TAKEN, all_turns,
    F: gl.constexpr, V: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Takes turns and fetches what they need, as places become empty.

    The first turn too is the next one: a program that has to wait for a multiprocessor has not kept a long one back.
    The number of each turn after it is taken at the beginning of the one before, and that of a tile one tile ahead.
    """
    CONSUMERS: gl.constexpr = S[0]
    FRESH: gl.constexpr = S[5]
    Q_PLACES: gl.constexpr = S[6]
    BYTES: gl.constexpr = CONSUMERS * CONSUMED * F.head_dim * 2
    turn = gl.atomic_add(TAKEN, 1, sem="relaxed")
    done = 0
    fetched = 0
    while turn < all_turns:
        following = gl.atomic_add(TAKEN, 1, sem="relaxed")
        row, batch, head = of_turn(turn, F, V)
        visited = visit(TABLE, TILES, batch, row, V)
        ahead = masked_tile(visited, 0, V)
        masked = visited.masked
        whole = visited.full_to - visited.full_from
        bias_row = 0
        if F.bias:
            of_batch: gl.constexpr = F.bias_batch // F.bias_query
            of_head: gl.constexpr = F.bias_head // F.bias_query
            bias_row = batch * of_batch + head * of_head + row * (CONSUMERS * CONSUMED)
        if FRESH:
            # Of a turn that sees nothing this is to be written: it has one tile, which is masked away. Where something
            # is continued, what there was before is in its place already.
            nothing = masked + whole == 0
            masked = gl.where(nothing, 1, masked)
            ahead = gl.where(nothing, 0, ahead)
        if masked + whole > 0:
            _announce(shared, done, turn, masked, whole)
            place = done % Q_PLACES
            full = shared.q_full.index(place)
            mbarrier.wait(shared.q_empty.index(place), ((done // Q_PLACES) & 1) ^ 1)
            mbarrier.expect(full, BYTES)
            first = batch * F.q_length + row * (CONSUMERS * CONSUMED)
            for number in gl.static_range(CONSUMERS):
                at = [first + number * CONSUMED, head * F.head_dim]
                fetch(q_tiles, at, full, shared.q.index(place * CONSUMERS + number))
            done += 1
        kv_head = head // F.group
        for step in range(0, masked):
            tile = ahead
            ahead = masked_tile(visited, step + 1, V)
            fetched = _tile_fetched(shared, k_tiles, v_tiles, bias_tiles, batch, kv_head, bias_row, tile, fetched, F, S)
        ahead = full_tile(visited, visited.full_from, V)
        for step in range(visited.full_from, visited.full_to):
            tile = ahead
            ahead = full_tile(visited, step + 1, V)
            fetched = _tile_fetched(shared, k_tiles, v_tiles, bias_tiles, batch, kv_head, bias_row, tile, fetched, F, S)
        turn = following
    _announce(shared, done, turn, 0, 0)


@gluon.jit
def _announce(shared, done, turn, masked, whole):
    """Tells the consumers of a turn, when they no longer need the last but one."""
    mbarrier.wait(shared.turns_empty.index(done % 2), ((done // 2) & 1) ^ 1)
    _put(shared.turns.index(done % 2), turn)
    _put(shared.masked.index(done % 2), masked)
    _put(shared.whole.index(done % 2), whole)
    mbarrier.arrive(shared.turns_full.index(done % 2), count=1)


@gluon.jit
def _put(place, number):
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def got(place):
    """The number in a place, for all threads of a consumer."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def of_turn(turn, F: gl.constexpr, V: gl.constexpr):
    """The tile of queries, batch row and head of a turn; the last tiles, which see most under a causal mask, first."""
    number, batch, head = owned(turn, V, F.heads)
    return V.rows - 1 - number, batch, head


@gluon.jit
def _tile_fetched(
    shared, k_tiles, v_tiles, bias_tiles, batch, kv_head, bias_row, tile, fetched, F: gl.constexpr, S: gl.constexpr
):
    """One tile of keys, with its bias, and one of values into the next place; how many there have been."""
    CONSUMERS: gl.constexpr = S[0]
    KV_TILE: gl.constexpr = S[1]
    STAGES: gl.constexpr = S[2]
    BYTES: gl.constexpr = KV_TILE * F.head_dim * 2
    place = fetched % STAGES
    phase = ((fetched // STAGES) & 1) ^ 1
    row = batch * F.kv_length + tile * KV_TILE
    column = kv_head * F.kv_head
    full = shared.k_full.index(place)
    mbarrier.wait(shared.k_empty.index(place), phase)
    _put(shared.tiles.index(place), tile)
    mbarrier.expect(full, BYTES + (CONSUMERS * CONSUMED * KV_TILE * 2 if F.bias else 0))
    fetch(k_tiles, [row, column], full, shared.k.index(place))
    if F.bias:
        for number in gl.static_range(CONSUMERS):
            mine = shared.bias.index(place * CONSUMERS + number)
            fetch(bias_tiles, [bias_row + number * CONSUMED, tile * KV_TILE], full, mine)
    full = shared.v_full.index(place)
    mbarrier.wait(shared.v_empty.index(place), phase)
    mbarrier.expect(full, BYTES)
    fetch(v_tiles, [row, column], full, shared.v.index(place))
    return fetched + 1


@gluon.jit
def next_turn(shared, done):
    """The number that the producer took next; not less than their count where none is left."""
    mbarrier.wait(shared.turns_full.index(done % 2), (done // 2) & 1)
    return got(shared.turns.index(done % 2))
