# SPDX-License-Identifier: Apache-2.0
"""The five products of the one-pass backward: what a consumer (four warps) computes for its 64 keys of a turn."""

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
from .backward_scores import head_sums, probabilities, score_gradients, tile_of, with_head_sums
from .forward_results import tile_offsets
from .hardware_barriers import sync_at, wait_until_full
from .head_tiles import left_layout, product_count, product_layout, product_of_heads
from .workarounds import again, arrive_at_constant, opaque_zero


@gluon.jit
def compute_gradients(
    NUMBER: gl.constexpr, shared, P, DK, DV, DHEADS, turns, F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr
):
    """The code of consumer `NUMBER`: computes and writes dk and dv of its 64 keys in every turn, and hands over dq.

    dk and dv are summed in registers over all query heads of the group.
    """
    DIM: gl.constexpr = F.padded_head_dim
    # A head's steps come in two parts: `before` masked steps and all whole steps, then `after` masked steps. Both parts
    # run through one copy of the code.
    PARTS: gl.constexpr = 2 if PLAN.masked else 1
    HEADS: gl.constexpr = 1 if PLAN.heads_inside else F.group
    TIMES: gl.constexpr = F.group if PLAN.heads_inside else 1
    taken = 0
    done = 0
    turn = next_turn(shared, taken, 4)
    while turn < turns.count:
        before = TIMES * read(shared, "before", taken % 2)
        whole = TIMES * read(shared, "whole", taken % 2)
        after = TIMES * read(shared, "after", taken % 2)
        dk = gl.zeros([64, DIM], gl.float32, product_layout(DIM))
        dv = gl.zeros([64, DIM], gl.float32, product_layout(DIM))
        for part in range(0, PARTS * HEADS):
            head = 0  # for calls in which no option but a bias depends on the head
            if F.by_head:
                member = part // PARTS
                _, batch, kv_head = owned(turn, T, F.kv_heads)
                head = of_head(P, batch, kv_head * F.group + member, F)
            dhead = head_sums(F)
            if PLAN.masked:
                end = done + gl.where(part % 2 == 0, before, after)
                for step in range(done, end):
                    dk, dv, dhead = _step_of(dk, dv, dhead, shared, step, NUMBER, P, turn, head, F, T, PLAN, True)
                done = end
            end = done + (gl.where(part % 2 == 0, whole, 0) if PLAN.masked else whole)
            for step in range(done, end):
                dk, dv, dhead = _step_of(dk, dv, dhead, shared, step, NUMBER, P, turn, head, F, T, PLAN, False)
            done = end
            if F.per_head_gradient:
                row, batch, kv_head = owned(turn, T, F.kv_heads)
                here = ((batch * F.heads + kv_head * F.group) * PARTS + part) * (2 * T.rows) + 2 * row + NUMBER
                gl.store(DHEADS + here, gl.sum(gl.sum(dhead, 1), 0))
        if PLAN.results_by_tma:
            mbarrier.arrive(barrier(shared, "turn_empty", taken % 2), count=1)
            # The writers take these results as those of two more steps (`add_dq`).
            hand_over(dv * F.keep_weight if F.dropout else dv, shared, done, NUMBER, PLAN, shared.ds.dtype)
            hand_over(scaled(dk, shared.ds, F), shared, done + 1, NUMBER, PLAN, shared.ds.dtype)
        else:
            row, batch, kv_head = finish_turn(shared, taken, T, F.kv_heads)
            first = row * PLAN.kv_tile + NUMBER * 64
            write_gradient(scaled(dk, shared.ds, F), DK, first, batch, kv_head, F, F.head_dim, 0)
            write_gradient(dv * F.keep_weight if F.dropout else dv, DV, first, batch, kv_head, F, F.value_dim, 0)
        taken += 1
        turn = next_turn(shared, taken, 4)


@gluon.jit
def write_gradient(sums, GRADIENT, first, batch, kv_head, F: gl.constexpr, DIM: gl.constexpr, FIRST_DIM: gl.constexpr):
    """Writes dk or dv of 64 keys from key `first` on, dimensions from `FIRST_DIM` on; `DIM` is the whole head size."""
    PADDED: gl.constexpr = sums.shape[1]
    written = sums.to(GRADIENT.dtype.element_ty)
    at, inside = tile_offsets(
        first, batch, kv_head, F.kv_length, F.kv_heads, DIM, FIRST_DIM, PADDED, product_layout(PADDED)
    )
    gl.store(GRADIENT + at, written, mask=inside)


@gluon.jit
def _step_of(
    dk, dv, dhead, shared, step, NUMBER: gl.constexpr, P, turn, head, F: gl.constexpr, T: gl.constexpr,
    PLAN: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One step: a query tile against the consumer's 64 keys, which are the rows of all tiles of scores.

    Scores `s = k q^T`; `p = exp(s - lse)`; `dp = v dout^T - delta`; `ds = p dp`; `dv += p dout`; `dk += ds q`; and half
    of `dq = ds^T k` over all 128 keys of the turn, for which the consumers exchange ds in shared memory. dq goes before
    dk: while the tensor cores compute dk, the threads store dq.
    """
    DIM: gl.constexpr = F.padded_head_dim
    Q_TILE: gl.constexpr = PLAN.q_tile
    zero = gl.zeros([64, Q_TILE], gl.float32, product_layout(Q_TILE))
    zero_dq = gl.zeros([64, 64], gl.float32, product_layout(64))
    place = step % PLAN.stages
    # In this kernel a head is one piece (`head_tiles`).
    k = shared.k[0].index(opaque_zero())
    v = shared.v[0].index(PLAN.v_first + opaque_zero())
    q = shared.q[0].index(place)
    dout_place = PLAN.dout_first + place
    dout = shared.dout[0].index(dout_place)
    wait_until_full(shared.q_full, step, PLAN.stages)
    s = product_of_heads((k.slice(NUMBER * 64, 64, dim=0),), (q,), zero, F.head_dim)
    s = subtract(s, shared, place, PLAN)
    wait_for(shared, "dout_full", step, PLAN.stages)
    v = again(v, shared.v, PLAN.v_first)
    v = v.slice(NUMBER * 64, 64, dim=0)
    dp = product_of_heads((v,), (again(dout, shared.dout, dout_place),), zero, F.value_dim)
    dp = subtract(dp, shared, PLAN.stages + place, PLAN)
    tile = tile_of(shared, place, P, turn, head, NUMBER, F, T, PLAN, MASKED)
    s = warpgroup_mma_wait(product_count(F.value_dim) + (1 if PLAN.subtracting else 0), deps=[s])
    p, steep = probabilities(s, tile, F, PLAN, MASKED)
    left = gl.convert_layout(p.to(shared.ds.dtype), left_layout(DIM))
    dv = warpgroup_mma(left, again(dout, shared.dout, dout_place), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    exact = score_gradients(steep, dp, tile, F, PLAN)
    dhead = with_head_sums(dhead, exact, tile, F, PLAN)
    ds = narrowed(exact, shared.ds, F)
    shared.ds.index(place).slice(NUMBER * 64, 64, dim=0).store(ds)
    sync_at("ds_full", 0, PLAN)
    fence_async_shared()  # for both consumers' ds, whose stores have ended at the barrier: it does not wait
    both = shared.ds.index(place)
    k = again(k, shared.k, 0)
    if DIM == 128:  # a consumer's half of dq is 64 columns
        dq = warpgroup_mma(both.permute((1, 0)), k.slice(NUMBER * 64, 64, dim=1), zero_dq, use_acc=False, is_async=True)
    else:  # a consumer's half of dq is 64 rows
        dq = warpgroup_mma(both.slice(NUMBER * 64, 64, dim=1).permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, left_layout(DIM)), again(q, shared.q, place), dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
    arrive_at_constant("dout_empty", place, PLAN)
    hand_over(dq, shared, step, NUMBER, PLAN)
    dk = warpgroup_mma_wait(0, deps=[dk])
    arrive_at_constant("q_empty", place, PLAN)
    return dk, dv, dhead


@gluon.jit
def subtract(product, shared, place, PLAN: gl.constexpr):
    """Begins to subtract lse or delta of each query from a product, if `PLAN.subtracting`.

    Place `place` of `shared.parts` has the negative numbers in parts, and a product of ones and these parts is added.
    That takes half the time of reading the numbers of a quarter of the queries into the registers of every thread.
    """
    if PLAN.subtracting:
        ones = gl.full([64, 16], 1.0, shared.parts.dtype, left_layout(PLAN.q_tile))
        return warpgroup_mma(ones, shared.parts.index(place).permute((1, 0)), product, is_async=True)
    else:
        return product


@gluon.jit
def hand_over(x, shared, step, NUMBER: gl.constexpr, PLAN: gl.constexpr, TYPE: gl.constexpr = None):
    """Writes `x` to place `NUMBER` of dq, for the writer of step `step`: a piece of dq, or if `TYPE` is given dk or dv.

    Unless the plan is `wide`, the writer makes the fence that must precede the read by TMA. A fence here would wait
    until everything is stored: some 270 of the 3,600 cycles of a step.
    """
    sync_at("dq_empty", NUMBER, PLAN)
    if TYPE is None:
        shared.dq.index(NUMBER).store(in_register_order(x))
    else:
        result_place(shared, NUMBER, TYPE, x.shape[1]).store(x.to(TYPE))
    if PLAN.wide:
        fence_async_shared()
    arrive_at_constant("dq_full", step % 2, PLAN, 2 * NUMBER)


@gluon.jit
def in_register_order(x):
    """Reorders a 64 by 64 product to `[16, 256]`, so that each thread stores 16 contiguous bytes at a time."""
    # Rows: 4 warps, 2 registers, 8 threads; columns: 8 registers, 4 threads, 2 registers.
    return gl.reshape(gl.permute(gl.reshape(x, (4, 2, 8, 8, 4, 2)), (3, 0, 2, 4, 1, 5)), (16, 256))
