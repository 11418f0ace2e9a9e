# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
"""What two single warps of the one-pass backward do: one takes turns and fetches tiles, the other adds dq to memory."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .schedule import tile_at, work_of
from .shared import next_turn, put_number

fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""As Triton 3.9 calls it, and as it was called before."""


@builtin
def async_atomic_add(tensor_desc, coord, src, _semantic=None):
    """Begins to add a tile in shared memory to device memory (Triton 3.6 has the operation, but no name for it)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def finish_additions(_semantic=None):
    """Waits until all that this warp added has reached memory; `tma.store_wait` waits until shared memory is read."""
    assembly = "cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; mov.u32 $0, 0;"
    result = _semantic.builder.get_int32_ty()
    _semantic.builder.create_inline_asm(assembly, "=r,~{memory}", [], [result], False, 1)


@gluon.jit
def fetch_tiles(
    shared, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, TABLE, TILES, COUNTERS, all_turns,
    F: gl.constexpr, V: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """Takes turns; fetches the keys and values of each, then the query tiles that it visits as places become empty.

    The next turn is taken when everything of this one is on its way, so that no turn waits long for its program.
    """
    VECTORS: gl.constexpr = PLAN.q_tile * F.head_dim * 2
    NUMBERS: gl.constexpr = PLAN.q_tile * 4
    taken = 0
    done = 0
    turn = gl.atomic_add(COUNTERS, 1, sem="relaxed")
    while turn < all_turns:
        mbarrier.wait(shared.turn_empty.index(taken % 2), ((taken // 2) & 1) ^ 1)
        put_number(shared.turn.index(taken % 2), turn)
        mbarrier.arrive(shared.turn_full.index(taken % 2), count=1)
        work = work_of(turn, TABLE, TILES, F, V, PLAN)
        keys_at = [work.batch * F.kv_length + work.row * PLAN.kv_tile, work.kv_head * F.kv_head]
        full = shared.kv_full.index(0)
        mbarrier.wait(shared.kv_empty.index(0), (taken & 1) ^ 1)
        mbarrier.expect(full, PLAN.kv_tile * F.head_dim * 2 * 2)
        fetch(k_tiles, keys_at, full, shared.k)
        fetch(v_tiles, keys_at, full, shared.v)
        ahead = tile_at(work, 0, V)
        for member in range(0, F.group):
            head = work.kv_head * F.group + member
            for step in range(0, work.steps):
                tile = ahead
                ahead = tile_at(work, gl.where(step + 1 < work.steps, step + 1, 0), V)
                place = done % PLAN.stages
                phase = ((done // PLAN.stages) & 1) ^ 1
                tokens_at = [work.batch * F.q_length + tile * PLAN.q_tile, head * F.head_dim]
                numbers_at = [work.batch * F.heads + head, tile * PLAN.q_tile]
                full = shared.q_full.index(place)
                mbarrier.wait(shared.q_empty.index(place), phase)
                put_number(shared.tile.index(place), tile)
                mbarrier.expect(full, VECTORS + NUMBERS)
                fetch(q_tiles, tokens_at, full, shared.q.index(place))
                fetch(lse_rows, numbers_at, full, shared.lse.index(place))
                full = shared.dout_full.index(place)
                mbarrier.wait(shared.dout_empty.index(place), phase)
                mbarrier.expect(full, VECTORS + NUMBERS)
                fetch(dout_tiles, tokens_at, full, shared.dout.index(place))
                fetch(delta_rows, numbers_at, full, shared.minus_delta.index(place))
                done += 1
        taken += 1
        turn = gl.atomic_add(COUNTERS, 1, sem="relaxed")
    mbarrier.wait(shared.turn_empty.index(taken % 2), ((taken // 2) & 1) ^ 1)
    put_number(shared.turn.index(taken % 2), turn)
    mbarrier.arrive(shared.turn_full.index(taken % 2), count=1)


@gluon.jit
def add_dq(
    shared, dq_tiles, TABLE, TILES, RANKS, COUNTERS, all_turns, F: gl.constexpr, V: gl.constexpr, PLAN: gl.constexpr
):
    """Adds the two halves of each dq tile to memory as the consumers compute them.

    Where the plan is `ordered`, a query tile has a counter of the turns that have added to it, and a turn waits until
    that is its rank among those that visit the tile. Ranks follow the numbers of turns, and programs take turns in
    that order, one after the other: so the lowest turn that is not done has begun and never waits, and there is no
    deadlock, however many programs run at a time.
    """
    Q_TILES: gl.constexpr = V.columns
    done = 0
    taken = 0
    turn = next_turn(shared, taken, 1)
    while turn < all_turns:
        work = work_of(turn, TABLE, TILES, F, V, PLAN)
        mbarrier.arrive(shared.turn_empty.index(taken % 2), count=1)
        group = work.batch if V.grouped else 0
        ranks = RANKS + (group * V.rows + work.row) * Q_TILES
        for member in range(0, F.group):
            first = (work.batch * F.heads + work.kv_head * F.group + member) * Q_TILES
            counters = COUNTERS + 1 + first
            tile = tile_at(work, 0, V)
            rank = 0
            reached = 0
            if PLAN.ordered:
                rank = gl.load(ranks + tile)
                reached = gl.load(counters + tile, volatile=True)
            for step in range(0, work.steps):
                following = tile_at(work, gl.where(step + 1 < work.steps, step + 1, 0), V)
                if PLAN.ordered:
                    while reached < rank:
                        reached = gl.load(counters + tile, volatile=True)
                place = (done % PLAN.dq_places) * 2
                phase = (done // PLAN.dq_places) & 1
                for half in gl.static_range(2):
                    mbarrier.wait(shared.dq_full.index(place + half), phase)
                    async_atomic_add(dq_tiles, [((first + tile) * 2 + half) * 16, 0], shared.dq.index(place + half))
                if PLAN.ordered:  # this is on its way while the additions are
                    rank = gl.load(ranks + following)
                    reached = gl.load(counters + following, volatile=True)
                for half in gl.static_range(2):
                    tma.store_wait(1 - half)
                    mbarrier.arrive(shared.dq_empty.index(place + half), count=1)
                if PLAN.ordered:
                    finish_additions()
                    gl.atomic_add(counters + tile, 1, sem="release")
                tile = following
                done += 1
        taken += 1
        turn = next_turn(shared, taken, 1)
    finish_additions()
