# SPDX-License-Identifier: Apache-2.0
"""The five products of the one-pass backward for heads of more than 128: one consumer computes dv, the other dk.

Both work on all 64 keys of a turn. The first consumer computes the softmax weights p and adds to dv. It hands p over in
shared memory to the second, which computes ds and adds to dk. dq has three or four squares: the first consumer computes
squares 0 and 1 from ds, the second the others.

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
from .backward_memory import barrier, finish_turn, load_query_values, next_turn, read, wait_for, weights_place
from .backward_products import hand_over, write_gradient
from .backward_scores import BackwardTurn, load_tile, probabilities
from .dq_order import from_register_order, in_register_order
from .hardware_barriers import arrive_at, sync_at, wait_until_full
from .head_tiles import dims_of, product_of_heads, stage_of
from .layouts import product_layout, register_layout
from .sums import accumulator, accumulators, add_product, no_sums, wait_for_sums
from .workarounds import arrive_at_constant, opaque_zero


@gluon.jit
def compute_dv(shared, P, DV, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The first consumer: computes dv of a turn's 64 keys, summed over all heads of the group, and two squares of
    dq."""
    # Steps come in two parts, as in `backward_products.compute_gradients`.
    HEADS: gl.constexpr = 1 if PLAN.heads_inside else F.group
    STEPS_PER_TILE: gl.constexpr = F.group if PLAN.heads_inside else 1
    turns_done = 0
    steps_done = 0
    number = next_turn(shared, turns_done, 4)
    while number < turns.count:
        turn = BackwardTurn(shared, P, number, 0)
        whole = STEPS_PER_TILE * read(shared, "whole", turns_done % 2)
        dv = no_sums(F.value_dim)
        if PLAN.masked:
            masked_before = STEPS_PER_TILE * read(shared, "masked_before", turns_done % 2)
            masked_after = STEPS_PER_TILE * read(shared, "masked_after", turns_done % 2)
            for part in range(0, 2 * HEADS):
                end = steps_done + gl.where(part % 2 == 0, masked_before, masked_after)
                for step in range(steps_done, end):
                    dv = _step_of_dv(dv, turn, step, F, T, PLAN, True)
                steps_done = end + gl.where(part % 2 == 0, whole, 0)
                for step in range(end, steps_done):
                    dv = _step_of_dv(dv, turn, step, F, T, PLAN, False)
        else:
            first = steps_done
            steps_done += HEADS * whole
            for step in range(first, steps_done):
                dv = _step_of_dv(dv, turn, step, F, T, PLAN, False)
        # Consumers arrive at kv_empty in every turn, and the producer waits for it only in turns that have steps. The
        # producer is never two phases ahead, because it waits for the turn_empty of the turn before last, at which
        # consumers arrive later (`finish_turn`): the order of these two lines matters.
        mbarrier.arrive(barrier(shared, "kv_empty", 0), count=1)
        key_tile, batch, kv_head = finish_turn(shared, turns_done, T, F.kv_heads)
        owner = key_tile * PLAN.kv_tile, batch, kv_head
        for part in gl.static_range(accumulators(F.value_dim)):
            write_gradient(dv[part], DV, owner, F, F.value_dim, accumulator(F.value_dim, part)[0])
        turns_done += 1
        number = next_turn(shared, turns_done, 4)


@gluon.jit
def compute_dk(shared, DK, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr):
    """The second consumer: computes dk of a turn's 64 keys, summed over all heads of the group, and the rest of dq."""
    arrive_at("weights_empty", 0, PLAN)
    turns_done = 0
    steps_done = 0
    number = next_turn(shared, turns_done, 4)
    while number < turns.count:
        masked_before = read(shared, "masked_before", turns_done % 2)
        whole = read(shared, "whole", turns_done % 2)
        masked_after = read(shared, "masked_after", turns_done % 2)
        dk = no_sums(F.head_dim)
        first = steps_done
        steps_done += F.group * (masked_before + whole + masked_after)
        for step in range(first, steps_done):
            dk = _step_of_dk(dk, shared, step, F, PLAN)
        mbarrier.arrive(barrier(shared, "kv_empty", 0), count=1)  # before `finish_turn`: see `compute_dv`
        key_tile, batch, kv_head = finish_turn(shared, turns_done, T, F.kv_heads)
        for part in gl.static_range(accumulators(F.head_dim)):
            found = scaled(dk[part], shared.ds, F)
            owner = key_tile * PLAN.kv_tile, batch, kv_head
            write_gradient(found, DK, owner, F, F.head_dim, accumulator(F.head_dim, part)[0])
        turns_done += 1
        number = next_turn(shared, turns_done, 4)


@gluon.jit
def _step_of_dv(dv, turn, step, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr, MASKED: gl.constexpr):
    """One query tile: scores `s = k q^T`; `p = exp(s - lse)`; `dv += p dout`; squares 0 and 1 of `dq = ds^T k`.

    The consumer hands p over to the other consumer, and takes ds from it. p is computed while the tile's dout is on the
    way, because dout may have only one stage.
    """
    shared = turn.shared
    stage = step % PLAN.q_stages
    wait_until_full(shared.q_full, step, PLAN.q_stages)
    s = product_of_heads(stage_of(shared.k, opaque_zero()), stage_of(shared.q, stage), F.head_dim)
    tile = load_tile(turn, stage, 0, F, T, PLAN, MASKED)
    s = warpgroup_mma_wait(0, deps=[s])
    p, _ = probabilities(s, tile, F, PLAN, MASKED)
    arrive_at("q_empty", stage, PLAN)
    sync_at("weights_empty", 0, PLAN)
    weights_place(shared).store(in_register_order(p))
    arrive_at("weights_full", 0, PLAN)
    dout_stage = step % PLAN.dout_stages
    wait_for(shared, "dout_full", step, PLAN.dout_stages)
    weights = p.to(shared.ds.dtype)
    dv = wait_for_sums(add_product(dv, weights, stage_of(shared.dout, dout_stage + opaque_zero()), F.value_dim))
    arrive_at("dout_empty", dout_stage, PLAN)
    sync_at("ds_full", 0, PLAN)
    square_0 = _square_of_dq(shared, 0)
    square_1 = _square_of_dq(shared, 1)
    square_0 = warpgroup_mma_wait(1, deps=[square_0])
    sync_at("dq_empty", 0, PLAN)
    shared.dq.index(0).store(in_register_order(square_0))
    square_1 = warpgroup_mma_wait(0, deps=[square_1])
    shared.dq.index(2).store(in_register_order(square_1))
    fence_async_shared()
    arrive_at_constant("dq_full", step % 2, PLAN)
    return dv


@gluon.jit
def _step_of_dk(dk, shared, step, F: gl.constexpr, PLAN: gl.constexpr):
    """One query tile: `dp = v dout^T - delta`; `ds = p dp`, which both consumers read; `dk += ds q`; the rest of dq."""
    SCORES: gl.constexpr = product_layout(PLAN.q_tile)
    FOUR: gl.constexpr = PLAN.squares(F.head_dim) == 4
    dout_stage = step % PLAN.dout_stages
    wait_for(shared, "dout_full", step, PLAN.dout_stages)
    dout = stage_of(shared.dout, dout_stage + opaque_zero())
    dp = product_of_heads(stage_of(shared.v, opaque_zero()), dout, F.value_dim)
    minus_delta = load_query_values(shared, "delta", dout_stage, PLAN)
    sync_at("weights_full", 0, PLAN)
    p = gl.convert_layout(from_register_order(weights_place(shared).load(register_layout())), SCORES)
    dp = warpgroup_mma_wait(0, deps=[dp])
    arrive_at("dout_empty", dout_stage, PLAN)
    ds = narrowed(p * (dp + minus_delta), shared.ds, F)
    _ds_place(shared).store(ds)  # all warps have read p: Triton makes them wait between the load and this
    fence_async_shared()
    arrive_at("ds_full", 0, PLAN)
    stage = step % PLAN.q_stages
    wait_until_full(shared.q_full, step, PLAN.q_stages)
    square_2 = _square_of_dq(shared, 2)
    square_3 = square_2
    if FOUR:
        square_3 = _square_of_dq(shared, 3)
    dk = add_product(dk, ds, stage_of(shared.q, stage), F.head_dim)
    if FOUR:
        square_2, square_3 = warpgroup_mma_wait(accumulators(F.head_dim), deps=[square_2, square_3])
    else:
        square_2 = warpgroup_mma_wait(accumulators(F.head_dim), deps=[square_2])
    arrive_at("weights_empty", 0, PLAN)
    hand_over(square_2, shared, step, 1, PLAN)
    dk = wait_for_sums(dk)
    arrive_at("q_empty", stage, PLAN)
    if FOUR:
        hand_over(square_3, shared, step, 1, PLAN)
    return dk


@gluon.jit
def _ds_place(shared):
    """The place of ds in shared memory: the first half of the place of the softmax weights."""
    return shared.ds.index(0).slice(0, 64, dim=0)


@gluon.jit
def _square_of_dq(shared, NUMBER: gl.constexpr):
    """Begins the product `ds^T k` for square `NUMBER` of dq, the 64 dimensions from `64 * NUMBER` on."""
    zero = gl.zeros([64, 64], gl.float32, product_layout(64))
    ds = _ds_place(shared).permute((1, 0))
    k = dims_of(stage_of(shared.k, opaque_zero()), NUMBER * 64, 64)
    return warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)
