# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
"""The producer of a program on Hopper: one warp that takes turns and fetches queries, keys, values and bias by TMA."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..kernels.tile_loop import full_tile, masked_tile, owned, visit
from .schedules import CONSUMER_ROWS

fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""The function that fetches a tile, by its name in Triton 3.9 or the name before."""


class Shared(NamedTuple):
    """The shared memory through which the producer feeds the consumers.

    Each place has two barriers: the producer or its fetches arrive at `full`, and all consumers at `empty`. For each
    tile of keys, `tiles` holds its number, and `bias` its part of the bias. For each turn, `turns` holds its number,
    `masked` how many of its tiles need a mask, and `whole` how many are visible as a whole.
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


@gluon.jit
def begin(barriers, PLACES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Initialises barriers, each of which completes a phase after `ARRIVALS` arrivals."""
    for place in gl.static_range(PLACES):
        mbarrier.init(barriers.index(place), count=ARRIVALS)


@gluon.jit
def produce(
    shared, q_tiles, k_tiles, v_tiles, bias_tiles, BOUNDS, TILES, TAKEN, all_turns,
    F: gl.constexpr, T: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Takes turns from a common counter and fetches their tiles, as places become empty.

    The first turn comes from the counter too: a program that starts late has then not kept a long turn back. The
    number of the next turn is taken at the beginning of a turn, and that of a tile one tile ahead.
    """
    CONSUMERS: gl.constexpr = S[0]
    FRESH: gl.constexpr = S[5]
    Q_PLACES: gl.constexpr = S[6]
    DIM: gl.constexpr = F.padded_head_dim
    BYTES: gl.constexpr = CONSUMERS * CONSUMER_ROWS * DIM * 2
    turn = gl.atomic_add(TAKEN, 1, sem="relaxed")
    done = 0
    fetched = 0
    while turn < all_turns:
        following = gl.atomic_add(TAKEN, 1, sem="relaxed")
        row, batch, head = of_turn(turn, F, T)
        visited = visit(BOUNDS, TILES, batch, row, T)
        ahead = masked_tile(visited, 0, T)
        masked = visited.masked
        whole = visited.full_to - visited.full_from
        bias_row = 0
        if F.bias:
            of_batch: gl.constexpr = F.bias_batch // F.bias_query
            of_head: gl.constexpr = F.bias_head // F.bias_query
            bias_row = batch * of_batch + head * of_head + row * (CONSUMERS * CONSUMER_ROWS)
        if FRESH:
            # A turn that sees nothing gets one tile that is masked away, so that its zeros are written. A partial
            # result that is continued is in its place already.
            nothing = masked + whole == 0
            masked = gl.where(nothing, 1, masked)
            ahead = gl.where(nothing, 0, ahead)
        if masked + whole > 0:
            _announce(shared, done, turn, masked, whole)
            place = done % Q_PLACES
            full = shared.q_full.index(place)
            mbarrier.wait(shared.q_empty.index(place), ((done // Q_PLACES) & 1) ^ 1)
            mbarrier.expect(full, BYTES)
            first = batch * F.q_length + row * (CONSUMERS * CONSUMER_ROWS)
            for number in gl.static_range(CONSUMERS):
                at = [head, first + number * CONSUMER_ROWS, 0]
                mine = shared.q.index(place * CONSUMERS + number).reshape((1, CONSUMER_ROWS, DIM))
                fetch(q_tiles, at, full, mine)
            done += 1
        kv_head = head // F.group
        for step in range(0, masked):
            tile = ahead
            ahead = masked_tile(visited, step + 1, T)
            fetched = _tile_fetched(shared, k_tiles, v_tiles, bias_tiles, batch, kv_head, bias_row, tile, fetched, F, S)
        ahead = full_tile(visited, visited.full_from, T)
        for step in range(visited.full_from, visited.full_to):
            tile = ahead
            ahead = full_tile(visited, step + 1, T)
            fetched = _tile_fetched(shared, k_tiles, v_tiles, bias_tiles, batch, kv_head, bias_row, tile, fetched, F, S)
        turn = following
    _announce(shared, done, turn, 0, 0)


@gluon.jit
def _announce(shared, done, turn, masked, whole):
    """Tells the consumers of a turn, once they no longer need the one before the last."""
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
    """Reads a number from a place, in all threads of a consumer."""
    return gl.max(place.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def of_turn(turn, F: gl.constexpr, T: gl.constexpr):
    """The tile of queries, batch row and head of a turn; the last tiles, which see most under a causal mask, first."""
    number, batch, head = owned(turn, T, F.heads)
    return T.rows - 1 - number, batch, head


@gluon.jit
def _tile_fetched(
    shared, k_tiles, v_tiles, bias_tiles, batch, kv_head, bias_row, tile, fetched, F: gl.constexpr, S: gl.constexpr
):
    """Fetches one tile of keys, with its bias, and one of values into the next place; returns how many there were."""
    CONSUMERS: gl.constexpr = S[0]
    KV_TILE: gl.constexpr = S[1]
    STAGES: gl.constexpr = S[2]
    DIM: gl.constexpr = F.padded_head_dim
    VALUE_DIM: gl.constexpr = F.padded_value_dim
    place = fetched % STAGES
    phase = ((fetched // STAGES) & 1) ^ 1
    at = [kv_head, batch * F.kv_length + tile * KV_TILE, 0]
    full = shared.k_full.index(place)
    mbarrier.wait(shared.k_empty.index(place), phase)
    _put(shared.tiles.index(place), tile)
    mbarrier.expect(full, KV_TILE * DIM * 2 + (CONSUMERS * CONSUMER_ROWS * KV_TILE * 2 if F.bias else 0))
    fetch(k_tiles, at, full, shared.k.index(place).reshape((1, KV_TILE, DIM)))
    if F.bias:
        for number in gl.static_range(CONSUMERS):
            mine = shared.bias.index(place * CONSUMERS + number)
            fetch(bias_tiles, [bias_row + number * CONSUMER_ROWS, tile * KV_TILE], full, mine)
    full = shared.v_full.index(place)
    mbarrier.wait(shared.v_empty.index(place), phase)
    mbarrier.expect(full, KV_TILE * VALUE_DIM * 2)
    fetch(v_tiles, at, full, shared.v.index(place).reshape((1, KV_TILE, VALUE_DIM)))
    return fetched + 1


@gluon.jit
def next_turn(shared, done):
    """The number of the next turn; past the last turn, a number that is not below their count."""
    mbarrier.wait(shared.turns_full.index(done % 2), (done // 2) & 1)
    return got(shared.turns.index(done % 2))
