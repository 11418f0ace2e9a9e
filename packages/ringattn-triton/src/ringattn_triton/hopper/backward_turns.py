# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Which query tiles a turn of the one-pass backward visits, in which order. A turn owns a tile of keys."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..kernels.tile_loop import full_tile, masked_tile, visit


class Turns(NamedTuple):
    """The turns of a launch, and the counters by which programs take turns and add to dq in order.

    `bounds` and `tiles` say which query tiles a turn visits (`kernels.tile_loop.visit`), `ranks` when a turn may add to
    a tile of dq, and `count` how many turns there are. `first_tile` points to the number of the first key tile, in a
    launch for a strip. The first of the `counters` is the number of turns that were taken. After it, each tile of dq
    has the number of turns that have added to it.
    """

    bounds: Any
    tiles: Any
    ranks: Any
    counters: Any
    count: Any
    first_tile: Any


class Steps(NamedTuple):
    """The query tiles that a turn visits for each head of a group.

    The first `before` tiles need a mask, the next `whole` tiles need none, and the last `after` tiles need one again.
    """

    visited: Any
    before: Any
    whole: Any
    after: Any


@gluon.jit
def take_turn(turns, T: gl.constexpr, PLAN: gl.constexpr):
    """Takes the next turn, a key tile to work on, and returns its number; if none is left, `turns.count` or more.

    In a launch for a strip, the counter runs over the strip's turns only. It is mapped to their numbers among all
    turns, in the same order.
    """
    turn = gl.atomic_add(turns.counters, 1, sem="relaxed")
    if PLAN.strip_rows:
        first = gl.load(turns.first_tile)
        together = gl.minimum(PLAN.strip_rows, T.rows - first) * T.together
        rest = turn % together
        heads_from = turn // together * T.together
        turn = gl.where(heads_from * T.rows < turns.count, heads_from * T.rows + first * T.together + rest, turns.count)
    return turn


@gluon.jit
def steps_of(row, batch, turns, T: gl.constexpr, PLAN: gl.constexpr):
    """The `Steps` of a turn: query tiles from the first to the last, or from the last to the first if `PLAN.ordered`.

    The first turns own the first keys, which most queries see under a causal mask. Turns of one head that run at the
    same time then reach each shared tile one after another, in the order in which they may add to it. These turns stay
    within a step or two of each other, so that the cache serves all but the first: 96 KiB a step from memory would be
    5.5 TB/s for all programs. Orders in which turns never wait put the turns of one head far apart. Then the cache does
    not serve them, and the kernel takes 1.6 times as long.
    """
    visited = visit(turns.bounds, turns.tiles, batch, row, T)
    whole = visited.full_to - visited.full_from
    after = visited.masked - visited.before
    if PLAN.ordered:
        return Steps(visited, after, whole, visited.before)
    else:
        return Steps(visited, visited.before, whole, after)


@gluon.constexpr_function
def heads_inside(F, PLAN):
    """Whether a turn visits a query tile for all heads of its group before the next tile; if not, one head at a time.

    Turns of one key head visit different numbers of tiles. With all tiles for a head first, these turns are soon at
    different heads, and share no tiles in the cache: with 8 heads in a group, the kernel takes 1.13 times as long.
    Turns that do not wait for each other are faster with all tiles for a head first. That order also lets options that
    depend on the head be read once for each head.
    """
    return PLAN.ordered and not F.by_head


@gluon.jit
def after_step(step, member, count, F: gl.constexpr, PLAN: gl.constexpr):
    """The next step of a turn: its query tile, number `step` of `count`, and its head, number `member` of the group.

    After the last step of the turn, `step` is 0 again.
    """
    if F.group == 1:
        return gl.where(step + 1 < count, step + 1, 0), member
    elif heads_inside(F, PLAN):
        step = gl.where(member + 1 < F.group, step, step + 1)
        return gl.where(step < count, step, 0), gl.where(member + 1 < F.group, member + 1, 0)
    else:
        return gl.where(step + 1 < count, step + 1, 0), gl.where(step + 1 < count, member, member + 1)


@gluon.jit
def tile_at(steps, step, T: gl.constexpr, PLAN: gl.constexpr):
    """The number of the query tile that a turn visits at `step`; after the last step, an arbitrary number."""
    number = step
    before = steps.before
    if PLAN.ordered:
        number = gl.maximum(steps.before + steps.whole + steps.after - 1 - step, 0)
        before = steps.after
    inside = number - before
    if (inside >= 0) & (inside < steps.whole):
        tile = full_tile(steps.visited, steps.visited.full_from + inside, T)
    else:
        tile = masked_tile(steps.visited, gl.where(inside < 0, number, number - steps.whole), T)
    return tile
