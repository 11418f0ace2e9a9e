# SPDX-License-Identifier: Apache-2.0
"""Which query tiles a turn of the one-pass backward visits, in which order. A turn owns a tile of keys."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.tile_loop import masked_tile, table_of, visit, whole_tile

_PATIENCE = gl.constexpr(2000)
"""The most looks at the counter of a program that waits for its neighbours' turns to be taken: 1 to 2 ms in all."""


class Turns(NamedTuple):
    """The turns of a launch, and the counters by which programs take turns and add to dq in order."""

    bounds: Any  # this, `tiles` and `ranks` are of a `visited_tiles.Table`
    tiles: Any
    ranks: Any
    counters: Any  # how many turns were taken; then, for each tile of dq, how many turns have added to it
    count: Any  # of turns
    first_tile: Any  # points to the number of the first key tile, in a launch for a strip


class Steps(NamedTuple):
    """The query tiles that a turn visits for each head of a group.

    The first `masked_before` tiles need a mask, the next `whole` tiles need none, and the last `masked_after` tiles
    need one again. The tile at step `i` is number `|i - start|` among them, counted from the first query: `start` is 0
    if the turn visits them upwards, and the number of the last tile if it visits them downwards.
    """

    visited: Any
    masked_before: Any
    whole: Any
    masked_after: Any
    start: Any


@gluon.jit
def take_turn(turns, T: gl.constexpr, PLAN: gl.constexpr):
    """Takes the next turn, a key tile to work on, and returns its number; if none is left, `turns.count` or more.

    A counter gives out turns, each once. Then their order is changed: over all programs, the numbers are a permutation
    of those that the counter gives out.

    If `PLAN.abreast` is above 1, the program then waits until other programs have taken the turns of the neighbouring
    key tiles, so that these turns visit each query tile one after another while it is in the cache. Nothing but the
    time depends on this wait. It ends after `_PATIENCE` looks, because perhaps no other program is free.
    """
    turn = gl.atomic_add(turns.counters, 1, sem="relaxed")
    if PLAN.abreast > 1:
        TOGETHER: gl.constexpr = PLAN.abreast * T.heads_at_once
        last = gl.minimum(turn // TOGETHER * TOGETHER + TOGETHER, turns.count)
        given_out = turn + 1
        looks = 0
        while (given_out < last) & (looks < _PATIENCE):
            given_out = gl.load(turns.counters, volatile=True)
            looks += 1
    if PLAN.strip_rows:
        return _in_strip(turn, turns, T, PLAN)
    elif PLAN.upwards:
        return _last_keys_first(turn, turns, T, PLAN)
    elif PLAN.interleaved:
        return _interleaved(turn, turns, T)
    else:
        return turn


@gluon.jit
def _in_strip(turn, turns, T: gl.constexpr, PLAN: gl.constexpr):
    """The number, among the turns of all strips, of turn `turn` of a strip; past the last, `turns.count`."""
    first = gl.load(turns.first_tile)
    of_heads = gl.minimum(PLAN.strip_rows, T.rows - first) * T.heads_at_once  # turns of the heads that run at once
    inside = turn % of_heads
    heads_from = turn // of_heads * T.heads_at_once
    first_turn = heads_from * T.rows
    return gl.where(first_turn < turns.count, first_turn + first * T.heads_at_once + inside, turns.count)


@gluon.jit
def _last_keys_first(turn, turns, T: gl.constexpr, PLAN: gl.constexpr):
    """Reverses the turns of the heads that run at once, so that their last keys come first, if they go upwards."""
    OF_HEADS: gl.constexpr = T.rows * T.heads_at_once
    return gl.where(goes_upwards(turn, turns, T, PLAN), (turn // OF_HEADS * 2 + 1) * OF_HEADS - 1 - turn, turn)


@gluon.jit
def _interleaved(turn, turns, T: gl.constexpr):
    """Alternates the second half of the turns of some heads with the first half of the turns of the next heads.

    Of 4 turns of heads A and B: A0 A1 A2 B0 A3 B1 B2 B3. Under a causal mask the first turns of a head are long and the
    last ones short. In their own order, all turns of the next heads would begin at once, and each would wait for the
    one before; interleaved, they begin some steps apart. The first half of the first heads, and the second half of the
    last heads, alternate with nothing.
    """
    OF_HEADS: gl.constexpr = T.rows * T.heads_at_once
    HALF: gl.constexpr = T.rows // 2 * T.heads_at_once
    later = gl.maximum(turn - HALF, 0)  # turns after the first half of the first heads
    row = later % OF_HEADS // T.heads_at_once  # even: a short turn, odd: a long turn of the next heads
    short = later // OF_HEADS * OF_HEADS + HALF + row // 2 * T.heads_at_once + later % T.heads_at_once
    number = gl.where(row % 2 == 0, short, short - HALF + OF_HEADS)
    return gl.where((turn < HALF) | (turn >= turns.count - OF_HEADS + HALF), turn, number)


@gluon.jit
def goes_upwards(turn, turns, T: gl.constexpr, PLAN: gl.constexpr):
    """Whether a turn visits its query tiles upwards: if `PLAN.upwards`, unless its head runs last.

    Downwards, the last turns of a head are short, so that all programs end together.
    """
    return turn < turns.count - T.rows * T.heads_at_once if PLAN.upwards else False


@gluon.jit
def steps_of(turn, owner, turns, T: gl.constexpr, PLAN: gl.constexpr):
    """The `Steps` of a turn. It visits its query tiles upwards, from the first to the last, or downwards.

    `owner` is the turn's key tile, batch row and key head (`kernels.tile_loop.owned`).

    Turns without an order go upwards. Turns with an order (`PLAN.ordered`) go where `goes_upwards` says, and visit
    all tiles in the order of their numbers: with masked tiles after the others, each would wait at its first tiles for
    the last tiles of the turn before, so that one would run after another.

    Downwards, the first turns own the first keys. Turns of one head that run at once reach each shared tile one after
    another, in the order in which they may add to it. They stay within a step or two of each other, so that the cache
    serves all but the first. But turns that begin together wait for each other at their first tile.

    Upwards, the first turns own the last keys. Under a causal mask each begins at its own diagonal, and reaches every
    tile after the turns that own later keys, so that none waits. Two turns are as many tiles apart as their keys: the
    cache must hold all queries of the heads that run at once.
    """
    key_tile, batch, kv_head = owner
    visited = visit(turns.bounds, turns.tiles, batch, kv_head, key_tile, T)
    whole = visited.whole_to - visited.whole_from
    before = visited.before
    after = visited.masked - before
    start = 0
    if PLAN.ordered:
        up = goes_upwards(turn, turns, T, PLAN)
        start = gl.where(up, 0, gl.maximum(whole + visited.masked - 1, 0))
        before, after = gl.where(up, before, after), gl.where(up, after, before)
    return Steps(visited, before, whole, after, start)


@gluon.jit
def next_step(step, member, count, F: gl.constexpr, PLAN: gl.constexpr):
    """The next step of a turn: its query tile, number `step` of `count`, and its head, number `member` of the group.

    After the last step of the turn, `step` is 0 again.
    """
    if F.group == 1:
        return gl.where(step + 1 < count, step + 1, 0), member
    elif PLAN.heads_inside:
        step = gl.where(member + 1 < F.group, step, step + 1)
        return gl.where(step < count, step, 0), gl.where(member + 1 < F.group, member + 1, 0)
    else:
        return gl.where(step + 1 < count, step + 1, 0), gl.where(step + 1 < count, member, member + 1)


@gluon.jit
def tile_at(steps, step, T: gl.constexpr, PLAN: gl.constexpr):
    """The number of the query tile that a turn visits at `step`; after the last step, an arbitrary number."""
    visited = steps.visited
    number = gl.abs(step - steps.start) if PLAN.ordered else step
    inside = number - visited.before
    whole = visited.whole_to - visited.whole_from
    if (inside >= 0) & (inside < whole):
        tile = whole_tile(visited, visited.whole_from + inside, T)
    else:
        tile = masked_tile(visited, gl.where(inside < 0, number, number - whole), T)
    return tile


@gluon.jit
def rank_of(tile, turn, owner, turns, T: gl.constexpr, PLAN: gl.constexpr):
    """How many turns add to query tile `tile` before this turn does."""
    key_tile, batch, kv_head = owner
    ranks = turns.ranks + tile + table_of(batch, kv_head, T) * ((T.rows + 1) * T.columns)
    rank = gl.load(ranks + key_tile * T.columns)
    if goes_upwards(turn, turns, T, PLAN):
        rank = gl.load(ranks + T.rows * T.columns) - 1 - rank
    return rank
