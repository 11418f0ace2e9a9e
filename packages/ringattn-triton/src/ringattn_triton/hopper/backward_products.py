# SPDX-License-Identifier: Apache-2.0
"""The five products of the one-pass backward: what a consumer (four warps) computes for its 64 keys of a turn."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kernels.scores import narrowed, of_head, scaled
from ..kernels.tile_loop import owned
from .backward_memory import barrier, finish_turn, next_turn, read, result_place, wait_for
from .backward_scores import BackwardTurn, distance, load_tile, probabilities, score_gradients
from .dq_order import in_register_order
from .hardware_barriers import sync_at, wait_until_full
from .head_tiles import product_count, product_of_heads, tile_offsets
from .layouts import left_layout, product_layout, quad_layout
from .sums import quad_sums
from .workarounds import arrive_at_constant, opaque_zero, readdress


class Sums(NamedTuple):
    """What the steps of a turn add up."""

    dk: Any
    dv: Any
    dhead: Any  # -1 times the gradient of the head's ALiBi slope, in `sums.quad_sums`; 0 if the call has none


@gluon.jit
def compute_gradients(
    CONSUMER: gl.constexpr, shared, P, DK, DV, DHEADS, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr
):
    """The code of consumer `CONSUMER`: computes and writes dk and dv of its 64 keys in every turn, and hands over dq.

    dk and dv are summed in registers over all query heads of the group.
    """
    DIM: gl.constexpr = F.padded_head_dim
    # The steps of a head, or if `PLAN.heads_inside` of all heads, come in two parts: masked steps and all whole steps,
    # then masked steps. Both parts run through one copy of the code. Options that depend on the head are read once for
    # each part, because `turn_order` does not set `heads_inside` in calls with such options.
    PARTS: gl.constexpr = 2 if PLAN.masked else 1
    HEADS: gl.constexpr = 1 if PLAN.heads_inside else F.group
    STEPS_PER_TILE: gl.constexpr = F.group if PLAN.heads_inside else 1
    turns_done = 0
    steps_done = 0
    number = next_turn(shared, turns_done, 4)
    while number < turns.count:
        masked_before = STEPS_PER_TILE * read(shared, "masked_before", turns_done % 2)
        whole = STEPS_PER_TILE * read(shared, "whole", turns_done % 2)
        masked_after = STEPS_PER_TILE * read(shared, "masked_after", turns_done % 2)
        dk = gl.zeros([64, DIM], gl.float32, product_layout(DIM))
        dv = gl.zeros([64, DIM], gl.float32, product_layout(DIM))
        for part in range(0, PARTS * HEADS):
            head = 0
            if F.by_head:
                member = part // PARTS
                _, batch, kv_head = owned(number, T, F.kv_heads)
                head = of_head(P, batch, kv_head * F.group + member, F)
            turn = BackwardTurn(shared, P, number, head)
            sums = Sums(dk, dv, gl.zeros([64, 4], gl.float32, quad_layout(4)) if F.slopes else 0)
            if PLAN.masked:
                end = steps_done + gl.where(part % 2 == 0, masked_before, masked_after)
                for step in range(steps_done, end):
                    sums = _step(sums, turn, step, CONSUMER, F, T, PLAN, True)
                steps_done = end
            end = steps_done + (gl.where(part % 2 == 0, whole, 0) if PLAN.masked else whole)
            for step in range(steps_done, end):
                sums = _step(sums, turn, step, CONSUMER, F, T, PLAN, False)
            steps_done = end
            dk, dv, dhead = sums
            if F.slopes:
                key_tile, batch, kv_head = owned(number, T, F.kv_heads)
                of_turn = ((batch * F.heads + kv_head * F.group) * PARTS + part) * (2 * T.rows) + 2 * key_tile
                gl.store(DHEADS + (of_turn + CONSUMER), gl.sum(gl.sum(dhead, 1), 0))
        if PLAN.results_by_tma:
            mbarrier.arrive(barrier(shared, "turn_empty", turns_done % 2), count=1)
            # The writers take these results as those of two more steps (`add_dq`). `steps_done` stays: each writer
            # takes one of them, so the order in which writers alternate is the same afterwards.
            hand_over(dv * F.keep_weight if F.dropout else dv, shared, steps_done, CONSUMER, PLAN, shared.ds.dtype)
            hand_over(scaled(dk, shared.ds, F), shared, steps_done + 1, CONSUMER, PLAN, shared.ds.dtype)
        else:
            key_tile, batch, kv_head = finish_turn(shared, turns_done, T, F.kv_heads)
            owner = key_tile * PLAN.kv_tile + CONSUMER * 64, batch, kv_head
            write_gradient(scaled(dk, shared.ds, F), DK, owner, F, F.head_dim, 0)
            write_gradient(dv * F.keep_weight if F.dropout else dv, DV, owner, F, F.value_dim, 0)
        turns_done += 1
        number = next_turn(shared, turns_done, 4)


@gluon.jit
def write_gradient(sums, GRADIENT, owner, F: gl.constexpr, DIM: gl.constexpr, FIRST_DIM: gl.constexpr):
    """Writes dk or dv of 64 keys, dimensions from `FIRST_DIM` on; `DIM` is the whole head size.

    `owner` is the first key, the batch row and the key head.
    """
    key, batch, kv_head = owner
    WIDTH: gl.constexpr = sums.shape[1]
    found = sums.to(GRADIENT.dtype.element_ty)
    LAYOUT: gl.constexpr = product_layout(WIDTH)
    at, inside = tile_offsets(key, batch, kv_head, F.kv_length, F.kv_heads, DIM, FIRST_DIM, WIDTH, LAYOUT)
    gl.store(GRADIENT + at, found, mask=inside)


@gluon.jit
def _step(
    sums, turn, step, CONSUMER: gl.constexpr, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """One step: a query tile against the consumer's 64 keys, which are the rows of all tiles of scores.

    Scores `s = k q^T`; `p = exp(s - lse)`; `dp = v dout^T - delta`; `ds = p dp`; `dv += p dout`; `dk += ds q`; and half
    of `dq = ds^T k` over all 128 keys of the turn, for which the consumers exchange ds in shared memory. dq goes before
    dk: while the tensor cores compute dk, the threads store dq. Products end in the order in which they begin. Each
    wait says how many may still be in flight.
    """
    DIM: gl.constexpr = F.padded_head_dim
    shared = turn.shared
    dk, dv, dhead = sums
    zero_dq = gl.zeros([64, 64], gl.float32, product_layout(64))
    stage = step % PLAN.q_stages
    # In this kernel a head is one piece (`head_tiles`).
    k = shared.k[0].index(opaque_zero())
    v = shared.v[0].index(PLAN.v_first + opaque_zero())
    q = shared.q[0].index(stage)
    dout_stage = PLAN.dout_first + stage
    dout = shared.dout[0].index(dout_stage)
    wait_until_full(shared.q_full, step, PLAN.q_stages)
    s = product_of_heads((k.slice(CONSUMER * 64, 64, dim=0),), (q,), F.head_dim)
    s = subtract(s, shared, stage, PLAN)
    wait_for(shared, "dout_full", step, PLAN.q_stages)
    v = readdress(v, shared.v, PLAN.v_first)
    v = v.slice(CONSUMER * 64, 64, dim=0)
    dp = product_of_heads((v,), (readdress(dout, shared.dout, dout_stage),), F.value_dim)
    dp = subtract(dp, shared, PLAN.q_stages + stage, PLAN)
    tile = load_tile(turn, stage, CONSUMER * 64, F, T, PLAN, MASKED)
    s = warpgroup_mma_wait(product_count(F.value_dim) + (1 if PLAN.subtracting else 0), deps=[s])  # leaves dp
    p, ds_factor = probabilities(s, tile, F, PLAN, MASKED)
    left = gl.convert_layout(p.to(shared.ds.dtype), left_layout(DIM))
    dv = warpgroup_mma(left, readdress(dout, shared.dout, dout_stage), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])  # leaves dv
    ds_float32 = score_gradients(ds_factor, dp, tile, F, PLAN)
    if F.slopes:
        dhead = dhead + quad_sums(ds_float32 * distance(tile, PLAN))
    ds = narrowed(ds_float32, shared.ds, F)
    shared.ds.index(stage).slice(CONSUMER * 64, 64, dim=0).store(ds)
    sync_at("ds_full", 0, PLAN)
    fence_async_shared()  # for both consumers' ds, whose stores have ended at the barrier: it does not wait
    both = shared.ds.index(stage)
    k = readdress(k, shared.k, 0)
    if DIM == 128:  # a consumer's half of dq is 64 columns
        ds_of_turn = both.permute((1, 0))
        k = k.slice(CONSUMER * 64, 64, dim=1)
    else:  # a consumer's half of dq is 64 rows
        ds_of_turn = both.slice(CONSUMER * 64, 64, dim=1).permute((1, 0))
    dq = warpgroup_mma(ds_of_turn, k, zero_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, left_layout(DIM)), readdress(q, shared.q, stage), dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])  # leaves dk
    arrive_at_constant("dout_empty", stage, PLAN)
    hand_over(dq, shared, step, CONSUMER, PLAN)
    dk = warpgroup_mma_wait(0, deps=[dk])
    arrive_at_constant("q_empty", stage, PLAN)
    return Sums(dk, dv, dhead)


@gluon.jit
def subtract(product, shared, stage, PLAN: gl.constexpr):
    """Begins to subtract lse or delta of each query from a product, if `PLAN.subtracting`.

    Stage `stage` of `shared.split` has each negative number as several bfloat16 numbers that add up to it. A product of
    ones and these numbers is added. That takes half the time of reading the numbers of a quarter of the queries into
    the registers of every thread.
    """
    if PLAN.subtracting:
        ones = gl.full([64, 16], 1.0, shared.split.dtype, left_layout(PLAN.q_tile))
        return warpgroup_mma(ones, shared.split.index(stage).permute((1, 0)), product, is_async=True)
    else:
        return product


@gluon.jit
def hand_over(x, shared, step, CONSUMER: gl.constexpr, PLAN: gl.constexpr, TYPE: gl.constexpr = None):
    """Writes `x` to the place of dq of a consumer, for the writer of step `step`: a square of dq, or in `TYPE` dk or
    dv.

    Unless the plan is `wide`, the writer makes the fence that must precede the read by TMA. A fence here would wait
    until everything is stored.
    """
    sync_at("dq_empty", CONSUMER, PLAN)
    if TYPE is None:
        shared.dq.index(CONSUMER).store(in_register_order(x))
    else:
        result_place(shared, CONSUMER, TYPE, x.shape[1]).store(x.to(TYPE))
    if PLAN.wide:
        fence_async_shared()
    arrive_at_constant("dq_full", step % 2, PLAN, 2 * CONSUMER)
