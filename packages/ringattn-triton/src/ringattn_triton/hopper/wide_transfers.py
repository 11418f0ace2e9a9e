# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOptionalMemberAccess=false
"""How dq of heads of more than 128 is added to memory: two warps take the steps in turn."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..kernels.tile_loop import owned
from .backward_memory import DQ_EMPTY, DQ_FULL, at, next_turn, shared_places
from .backward_transfers import add_piece, wait_for_additions
from .backward_turns import after_step, steps_of, tile_at
from .hardware_barriers import hardware_barrier


@gluon.jit
def add_wide_dq(NUMBER: gl.constexpr, memory, tiles, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """Adds the pieces of dq of both consumers to memory, in every other step. Its order is that of `add_dq`.

    The first consumer hands over its two pieces together, in places 0 and 2. The other hands over one or two pieces,
    one after the other, in place 1.
    """
    Q_TILES: gl.constexpr = T.columns
    PIECES: gl.constexpr = PLAN.pieces(F.head_dim)
    shared = shared_places(memory, PLAN)
    if NUMBER == 0:  # at first all places are empty
        hardware_barrier("arrive", DQ_EMPTY, 160)
        hardware_barrier("arrive", DQ_EMPTY + 1, 160)
    done = 0
    taken = 0
    turn = next_turn(shared, taken, 1)
    while turn < turns.count:
        row, batch, kv_head = owned(turn, T, F.kv_heads)
        mbarrier.arrive(at(shared.turn_empty, taken % 2), count=1)
        steps = steps_of(row, batch, turns, T, PLAN)
        count = steps.before + steps.whole + steps.after
        group = batch if T.grouped else 0
        ranks = turns.ranks + (group * T.rows + row) * Q_TILES
        step = 0
        member = 0
        start = (done + NUMBER) % 2
        if start == 1:
            step, member = after_step(step, member, count, F, PLAN)
        ahead = tile_at(steps, step, T, PLAN)
        for _ in range(start, F.group * count, 2):
            tile = ahead
            first = (batch * F.heads + kv_head * F.group + member) * Q_TILES
            counters = turns.counters + 1 + first
            step, member = after_step(step, member, count, F, PLAN)
            step, member = after_step(step, member, count, F, PLAN)
            ahead = tile_at(steps, step, T, PLAN)
            rank = 0
            reached = 0
            if PLAN.ordered:
                rank = gl.load(ranks + tile)
                reached = gl.load(counters + tile, volatile=True)
            to = (first + tile) * PIECES * 16
            for piece in gl.static_range(PIECES // 2):
                hardware_barrier("sync", DQ_FULL + 2 + NUMBER, 160)
                if piece == 0:
                    while reached < rank:
                        reached = gl.load(counters + tile, volatile=True)
                add_piece(tiles.dq, to + (PIECES - PIECES // 2 + piece) * 16, shared.dq.index(1), rank, PLAN)
                tma.store_wait(0)
                hardware_barrier("arrive", DQ_EMPTY + 1, 160)
                if piece == 0:
                    hardware_barrier("sync", DQ_FULL + NUMBER, 160)
                    add_piece(tiles.dq, to, shared.dq.index(0), rank, PLAN)
                    add_piece(tiles.dq, to + 16, shared.dq.index(2), rank, PLAN)
                    tma.store_wait(0)
                    hardware_barrier("arrive", DQ_EMPTY, 160)
            if PLAN.ordered:
                wait_for_additions(0)
                gl.atomic_add(counters + tile, 1, sem="release")
        done += F.group * count
        taken += 1
        turn = next_turn(shared, taken, 1)
    wait_for_additions(0)
