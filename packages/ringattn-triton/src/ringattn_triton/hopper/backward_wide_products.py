# SPDX-License-Identifier: Apache-2.0
"""The five products of the one-pass backward for heads of more than 128: one consumer computes dv, the other dk.

Both work on all 64 keys of a turn. The first consumer computes the softmax weights p and adds to dv. It hands p over in
shared memory to the second, which computes ds and adds to dk. Each computes a part of dq from ds.

One place holds p, and then ds. The second consumer writes ds when it has read p. The first writes the next p when the
products of both consumers with ds have ended. These products begin before either consumer waits for a writer of dq. So
p never waits for writers, which may wait for their turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.scores import narrowed, scaled
from .backward_memory import barrier, finish_turn, next_turn, read, wait_for, weights_place
from .backward_products import hand_over, in_register_order, write_gradient
from .backward_scores import load_query_values, probabilities, tile_of
from .hardware_barriers import arrive_at, sync_at, wait_until_full
from .head_tiles import dims_of, product_layout, product_of_heads, stage_of
from .sums import accumulators, add_product, first_of, no_sums, wait_for_sums
from .workarounds import arrive_at_constant, opaque_zero


@gluon.jit
def compute_dv(shared, P, DV, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The first consumer: computes dv of a turn's 64 keys, summed over all heads of the group, and two pieces of dq."""
    HEADS: gl.constexpr = 1 if PLAN.heads_inside else F.group
    TIMES: gl.constexpr = F.group if PLAN.heads_inside else 1
    taken = 0
    done = 0
    turn = next_turn(shared, taken, 4)
    while turn < turns.count:
        whole = TIMES * read(shared, "whole", taken % 2)
        dv = no_sums(F.value_dim)
        if PLAN.masked:
            before = TIMES * read(shared, "before", taken % 2)
            after = TIMES * read(shared, "after", taken % 2)
            # Steps come in two parts: `before` masked steps and all whole steps, then `after` masked steps. Both parts
            # run through one copy of the code.
            for part in range(0, 2 * HEADS):
                end = done + gl.where(part % 2 == 0, before, after)
                for step in range(done, end):
                    dv = _step_of_dv(dv, shared, step, P, turn, F, T, PLAN, True)
                done = end + gl.where(part % 2 == 0, whole, 0)
                for step in range(end, done):
                    dv = _step_of_dv(dv, shared, step, P, turn, F, T, PLAN, False)
        else:
            first = done
            done += HEADS * whole
            for step in range(first, done):
                dv = _step_of_dv(dv, shared, step, P, turn, F, T, PLAN, False)
        mbarrier.arrive(barrier(shared, "kv_empty", 0), count=1)
        row, batch, kv_head = finish_turn(shared, taken, T, F.kv_heads)
        for piece in gl.static_range(accumulators(F.value_dim)):
            write_gradient(
                dv[piece], DV, row * PLAN.kv_tile, batch, kv_head, F, F.value_dim, first_of(F.value_dim, piece)
            )
        taken += 1
        turn = next_turn(shared, taken, 4)


@gluon.jit
def compute_dk(shared, DK, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The second consumer: computes dk of a turn's 64 keys, summed over all heads of the group, and the rest of dq."""
    arrive_at("weights_empty", 0, PLAN)
    taken = 0
    done = 0
    turn = next_turn(shared, taken, 4)
    while turn < turns.count:
        before = read(shared, "before", taken % 2)
        whole = read(shared, "whole", taken % 2)
        after = read(shared, "after", taken % 2)
        dk = no_sums(F.head_dim)
        first = done
        done += F.group * (before + whole + after)
        for step in range(first, done):
            dk = _step_of_dk(dk, shared, step, F, PLAN)
        mbarrier.arrive(barrier(shared, "kv_empty", 0), count=1)
        row, batch, kv_head = finish_turn(shared, taken, T, F.kv_heads)
        for piece in gl.static_range(accumulators(F.head_dim)):
            found = scaled(dk[piece], shared.ds, F)
            write_gradient(found, DK, row * PLAN.kv_tile, batch, kv_head, F, F.head_dim, first_of(F.head_dim, piece))
        taken += 1
        turn = next_turn(shared, taken, 4)


@gluon.jit
def _step_of_dv(dv, shared, step, P, turn, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr):
    """One query tile: scores `s = k q^T`; `p = exp(s - lse)`; `dv += p dout`; two pieces of `dq = ds^T k`.

    The consumer hands p over to the other consumer, and takes ds from it. p is computed while the tile's dout is on the
    way, because dout may have only one place.
    """
    Q_TILE: gl.constexpr = PLAN.q_tile
    place = step % PLAN.stages
    wait_until_full(shared.q_full, step, PLAN.stages)
    zero = gl.zeros([64, Q_TILE], gl.float32, product_layout(Q_TILE))
    s = product_of_heads(stage_of(shared.k, opaque_zero()), stage_of(shared.q, place), zero, F.head_dim)
    tile = tile_of(shared, place, P, turn, 0, 0, F, T, PLAN, MASKED)
    s = warpgroup_mma_wait(0, deps=[s])
    p, _ = probabilities(s, tile, F, PLAN, MASKED)
    arrive_at("q_empty", place, PLAN)
    sync_at("weights_empty", 0, PLAN)
    weights_place(shared).store(in_register_order(p))
    arrive_at("weights_full", 0, PLAN)
    dout_place = step % PLAN.dout_stages
    wait_for(shared, "dout_full", step, PLAN.dout_stages)
    weights = p.to(shared.ds.dtype)
    dv = wait_for_sums(add_product(dv, weights, stage_of(shared.dout, dout_place + opaque_zero()), F.value_dim))
    arrive_at("dout_empty", dout_place, PLAN)
    sync_at("ds_full", 0, PLAN)
    dq = _piece_of_dq(shared, 0)
    other = _piece_of_dq(shared, 1)
    dq = warpgroup_mma_wait(1, deps=[dq])
    sync_at("dq_empty", 0, PLAN)
    shared.dq.index(0).store(in_register_order(dq))
    other = warpgroup_mma_wait(0, deps=[other])
    shared.dq.index(2).store(in_register_order(other))
    fence_async_shared()
    arrive_at_constant("dq_full", step % 2, PLAN)
    return dv


@gluon.jit
def _step_of_dk(dk, shared, step, F: gl.constexpr, PLAN: gl.constexpr):
    """One query tile: `dp = v dout^T - delta`; `ds = p dp`, which both consumers read; `dk += ds q`; the rest of dq."""
    Q_TILE: gl.constexpr = PLAN.q_tile
    SCORES: gl.constexpr = product_layout(Q_TILE)
    PIECES: gl.constexpr = PLAN.pieces(F.head_dim)
    FIRST: gl.constexpr = PIECES - PIECES // 2
    dout_place = step % PLAN.dout_stages
    wait_for(shared, "dout_full", step, PLAN.dout_stages)
    zero = gl.zeros([64, Q_TILE], gl.float32, SCORES)
    dout = stage_of(shared.dout, dout_place + opaque_zero())
    dp = product_of_heads(stage_of(shared.v, opaque_zero()), dout, zero, F.value_dim)
    minus_delta = load_query_values("delta", shared.rows, dout_place, PLAN)
    sync_at("weights_full", 0, PLAN)
    p = gl.convert_layout(_from_register_order(weights_place(shared).load(register_layout())), SCORES)
    dp = warpgroup_mma_wait(0, deps=[dp])
    arrive_at("dout_empty", dout_place, PLAN)
    ds = narrowed(p * (dp + minus_delta), shared.ds, F)
    _ds_place(shared).store(ds)  # all warps have read p: Triton makes them wait between the load and this
    fence_async_shared()
    arrive_at("ds_full", 0, PLAN)
    place = step % PLAN.stages
    wait_until_full(shared.q_full, step, PLAN.stages)
    dq = _piece_of_dq(shared, FIRST)
    other = dq
    if PIECES // 2 > 1:
        other = _piece_of_dq(shared, FIRST + 1)
    dk = add_product(dk, ds, stage_of(shared.q, place), F.head_dim)
    if PIECES // 2 > 1:
        dq, other = warpgroup_mma_wait(accumulators(F.head_dim), deps=[dq, other])
    else:
        dq = warpgroup_mma_wait(accumulators(F.head_dim), deps=[dq])
    arrive_at("weights_empty", 0, PLAN)
    hand_over(dq, shared, step, 1, PLAN)
    dk = wait_for_sums(dk)
    arrive_at("q_empty", place, PLAN)
    if PIECES // 2 > 1:
        hand_over(other, shared, step, 1, PLAN)
    return dk


@gluon.jit
def _ds_place(shared):
    """The place of ds in shared memory: the first half of the place of the softmax weights."""
    return shared.ds.index(0).slice(0, 64, dim=0)


@gluon.jit
def _piece_of_dq(shared, NUMBER: gl.constexpr):
    """Begins the product `ds^T k` for piece `NUMBER` of dq, the 64 dimensions from `64 * NUMBER` on."""
    zero = gl.zeros([64, 64], gl.float32, product_layout(64))
    ds = _ds_place(shared).permute((1, 0))
    return warpgroup_mma(
        ds, dims_of(stage_of(shared.k, opaque_zero()), NUMBER * 64, 64), zero, use_acc=False, is_async=True
    )


@gluon.constexpr_function
def register_layout():
    """The register layout in which threads hold the results of `in_register_order`."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [2, 0], [4, 0], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        warp_bases=[[0, 128], [1, 0]],
        block_bases=[],
        shape=[16, 256],
    )


@gluon.jit
def _from_register_order(x):
    """Reorders `[16, 256]` to the `[64, 64]` that `in_register_order` was given."""
    return gl.reshape(gl.permute(gl.reshape(x, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5)), (64, 64))
