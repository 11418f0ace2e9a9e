# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""How dq of heads of more than 128 is added to memory: one warp for each of the two consumers that compute it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..kernels.tile_loop import owned
from .backward_memory import DQ_EMPTY, DQ_FULL, at, next_turn, shared_places
from .backward_transfers import async_atomic_add, wait_for_additions
from .backward_turns import steps_of, tile_at
from .hardware_barriers import hardware_barrier


@gluon.jit
def add_wide_dq(NUMBER: gl.constexpr, memory, tiles, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """Adds the pieces of consumer `NUMBER` to memory, in the order in which it computes them.

    Where the plan is `ordered`, the pieces of each consumer have counters of their own; otherwise as in `add_dq`.
    """
    Q_TILES: gl.constexpr = T.columns
    PIECES: gl.constexpr = PLAN.pieces(F.head_dim)
    FIRST: gl.constexpr = 0 if NUMBER == 0 else PIECES - PIECES // 2
    COUNT: gl.constexpr = PIECES - PIECES // 2 if NUMBER == 0 else PIECES // 2
    shared = shared_places(memory, PLAN)
    hardware_barrier("arrive", DQ_EMPTY + NUMBER, 160)  # at first all places are empty
    if NUMBER == 0:
        hardware_barrier("arrive", DQ_EMPTY + 2, 160)
    taken = 0
    turn = next_turn(shared, taken, 1)
    while turn < turns.count:
        row, batch, kv_head = owned(turn, T, F.kv_heads)
        mbarrier.arrive(at(shared.turn_empty, taken % 2), count=1)
        steps = steps_of(row, batch, turns, T, PLAN)
        count = steps.before + steps.whole + steps.after
        group = batch if T.grouped else 0
        ranks = turns.ranks + (group * T.rows + row) * Q_TILES
        for member in range(0, F.group):
            first = (batch * F.heads + kv_head * F.group + member) * Q_TILES
            counters = turns.counters + 1 + 2 * first + NUMBER
            ahead = tile_at(steps, 0, T, PLAN)
            rank = 0
            reached = 0
            if PLAN.ordered:  # noqa: SIM102 (one condition is known when the kernel is compiled)
                if count > 0:
                    rank = gl.load(ranks + ahead)
                    reached = gl.load(counters + 2 * ahead, volatile=True)
            for step in range(0, count):
                tile = ahead
                ahead = tile_at(steps, gl.where(step + 1 < count, step + 1, 0), T, PLAN)
                if PLAN.ordered:
                    while reached < rank:
                        reached = gl.load(counters + 2 * tile, volatile=True)
                for piece in gl.static_range(COUNT):
                    # The first consumer has two places, the other uses one twice.
                    place = 2 * piece if NUMBER == 0 else 1
                    hardware_barrier("sync", DQ_FULL + place, 160)
                    to = ((first + tile) * PIECES + FIRST + piece) * 16
                    async_atomic_add(tiles.dq, [to, 0], shared.dq.index(place))
                    tma.store_wait(0)
                    hardware_barrier("arrive", DQ_EMPTY + place, 160)
                if PLAN.ordered:
                    # These loads are on their way while the additions are.
                    rank = gl.load(ranks + ahead)
                    reached = gl.load(counters + 2 * ahead, volatile=True)
                    wait_for_additions(0)
                    gl.atomic_add(counters + 2 * tile, 1, sem="release")
        taken += 1
        turn = next_turn(shared, taken, 1)
    wait_for_additions(0)
