# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportUnboundVariable=false, reportPossiblyUnboundVariable=false
"""The five products of the one-pass backward: what a consumer (four warps) computes for its 64 keys of a turn."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..availability import triton_version
from ..kernels.scores import narrowed, of_head, scaled
from ..kernels.tile_loop import owned
from .backward_memory import (
    barrier,
    finished_turn,
    next_turn,
    read,
    result_place,
)
from .backward_scores import bias_of, derivatives, head_sums, probabilities, tile_of, weights, with_head_sums
from .hardware_barriers import arrive_at_constant, wait_at
from .head_tiles import opaque_zero, product_count, product_of_heads
from .results import places
from .sums import layout_of

_DESCRIPTORS_COME_EARLY = gl.constexpr(triton_version() > (3, 6))
"""Whether this Triton computes the descriptors of all products of a step as soon as their addresses are known."""


@gluon.jit
def again(place, places, number):
    """Place `number` of `places`: `place` itself, or with Triton after 3.6 the same place by a new address.

    Triton 3.9 computes the descriptors of all products of a step as soon as their addresses are known, and holds the
    descriptors in registers until they are used: a step then spills up to 264 more bytes to the stack. An address that
    is computed anew becomes known only here. Triton 3.6 computes each descriptor where it is used.
    """
    if _DESCRIPTORS_COME_EARLY:
        return places[0].index(number + opaque_zero())
    else:
        return place


@gluon.constexpr_function
def results_by_tma(GRADIENT, PLAN):
    """Whether consumers leave dk and dv in shared memory, from where TMA writes them to global memory."""
    return GRADIENT.dtype.element_ty.primitive_bitwidth == 16 and not PLAN.wide


@gluon.jit
def compute_gradients(
    NUMBER: gl.constexpr, shared, P, DK, DV, DHEADS, turns,
    F: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """The code of consumer `NUMBER`: computes and writes dk and dv of its 64 keys in every turn, and hands over dq.

    dk and dv are summed in registers over all query heads of the group.
    """
    DIM: gl.constexpr = F.padded_head_dim
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PLAN.q_tile, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    # A head's steps come in two parts: `before` masked steps and all whole steps, then `after` masked steps. Both parts
    # run through one copy of the code.
    PARTS: gl.constexpr = 2 if PLAN.masked else 1
    HEADS: gl.constexpr = 1 if PLAN.heads_inside else F.group
    TIMES: gl.constexpr = F.group if PLAN.heads_inside else 1
    RESULTS_BY_TMA: gl.constexpr = results_by_tma(DK, PLAN)
    taken = 0
    done = 0
    turn = next_turn(shared, taken, 4)
    while turn < turns.count:
        before = TIMES * read(shared, "before", taken % 2)
        whole = TIMES * read(shared, "whole", taken % 2)
        after = TIMES * read(shared, "after", taken % 2)
        dk = gl.zeros([64, DIM], gl.float32, SUMS)
        dv = gl.zeros([64, DIM], gl.float32, SUMS)
        for part in range(0, PARTS * HEADS):
            head = _head_of(P, turn, part // PARTS, F, T)
            dhead = head_sums(F)
            if PLAN.masked:
                end = done + gl.where(part % 2 == 0, before, after)
                for step in range(done, end):
                    dk, dv, dhead = _step_of(
                        dk, dv, dhead, shared, step, NUMBER, P, turn, head, F, T, PLAN, True, SCORES, SUMS
                    )
                done = end
            end = done + (gl.where(part % 2 == 0, whole, 0) if PLAN.masked else whole)
            for step in range(done, end):
                dk, dv, dhead = _step_of(
                    dk, dv, dhead, shared, step, NUMBER, P, turn, head, F, T, PLAN, False, SCORES, SUMS
                )
            done = end
            if F.per_head_gradient:
                row, batch, kv_head = owned(turn, T, F.kv_heads)
                here = ((batch * F.heads + kv_head * F.group) * PARTS + part) * (2 * T.rows) + 2 * row + NUMBER
                gl.store(DHEADS + here, gl.sum(gl.sum(dhead, 1), 0))
        if RESULTS_BY_TMA:
            mbarrier.arrive(barrier(shared, "turn_empty", taken % 2), count=1)
            _hand_over_result(dv * F.keep_weight if F.dropout else dv, shared, done, NUMBER, DV, PLAN)
            _hand_over_result(scaled(dk, shared.ds, F), shared, done + 1, NUMBER, DK, PLAN)
        else:
            row, batch, kv_head = finished_turn(shared, taken, T, F.kv_heads)
            first = row * PLAN.kv_tile + NUMBER * 64
            write_gradient(scaled(dk, shared.ds, F), DK, first, batch, kv_head, F, F.head_dim, 0)
            write_gradient(dv * F.keep_weight if F.dropout else dv, DV, first, batch, kv_head, F, F.value_dim, 0)
        taken += 1
        turn = next_turn(shared, taken, 4)


@gluon.jit
def write_gradient(
    sums, GRADIENT, first, batch, kv_head, F: gl.constexpr, DIM: gl.constexpr, FIRST_DIM: gl.constexpr,
):  # fmt: skip
    """Writes dk or dv of 64 keys from key `first` on, dimensions from `FIRST_DIM` on; `DIM` is the whole head size."""
    PADDED: gl.constexpr = sums.shape[1]
    SUMS: gl.constexpr = layout_of(PADDED)
    written = gl.convert_layout(sums.to(GRADIENT.dtype.element_ty), SUMS)
    at, inside = places(first, batch, kv_head, F.kv_length, F.kv_heads, DIM, FIRST_DIM, PADDED, SUMS)
    gl.store(GRADIENT + at, written, mask=inside)


@gluon.jit
def _head_of(P, turn, member, F: gl.constexpr, T: gl.constexpr):
    """The `Head` of query head number `member` of a turn's group; 0 if no option but a bias depends on the head."""
    if F.by_head:
        _, batch, kv_head = owned(turn, T, F.kv_heads)
        return of_head(P, batch, kv_head * F.group + member, F)
    else:
        return 0


@gluon.jit
def _step_of(
    dk, dv, dhead, shared, step, NUMBER: gl.constexpr, P, turn, head, F: gl.constexpr, T: gl.constexpr,
    PLAN: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """One step: a query tile against the consumer's 64 keys, which are the rows of all tiles of scores.

    Scores `s = k q^T`; `p = exp(s - lse)`; `dp = v dout^T - delta`; `ds = p dp`; `dv += p dout`; `dk += ds q`; and half
    of `dq = ds^T k` over all 128 keys of the turn, for which the consumers exchange ds in shared memory. dq goes before
    dk: while the tensor cores compute dk, the threads store dq.
    """
    DIM: gl.constexpr = F.padded_head_dim
    Q_TILE: gl.constexpr = PLAN.q_tile
    TYPE: gl.constexpr = shared.ds.dtype
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    zero = gl.zeros([64, Q_TILE], gl.float32, SCORES)
    zero_dq = gl.zeros([64, 64], gl.float32, HALF)
    place = step % PLAN.stages
    phase = (step // PLAN.stages) & 1
    # In this kernel a head is one piece (`head_tiles`).
    k = shared.k[0].index(opaque_zero())
    v = shared.v[0].index(PLAN.v_first + opaque_zero())
    q = shared.q[0].index(place)
    dout_place = PLAN.dout_first + place
    dout = shared.dout[0].index(dout_place)
    mbarrier.wait(shared.q_full.index(place), phase)
    s = product_of_heads((k.slice(NUMBER * 64, 64, dim=0),), (q,), zero, F.head_dim)
    s = subtracted(s, shared, place, PLAN, SCORES)
    mbarrier.wait(barrier(shared, "dout_full", place), phase)
    v = again(v, shared.v, PLAN.v_first)
    v = v.slice(NUMBER * 64, 64, dim=0)
    dp = product_of_heads((v,), (again(dout, shared.dout, dout_place),), zero, F.value_dim)
    dp = subtracted(dp, shared, PLAN.stages + place, PLAN, SCORES)
    tile = 0
    if MASKED or F.distances or F.dropout:
        row, batch, _ = owned(turn, T, F.kv_heads)
        tile = tile_of(
            P, batch, read(shared, "tile", place), row, head, NUMBER, F, PLAN, MASKED, SCORES
        )  # fmt: skip
    bias = bias_of(shared, place, NUMBER, F, SCORES)
    s = warpgroup_mma_wait(product_count(F.value_dim) + (1 if PLAN.subtracting else 0), deps=[s])
    p, steep = probabilities(s, shared.rows, place, tile, bias, head, F, PLAN, MASKED, SCORES)
    left = gl.convert_layout(weights(p, F).to(TYPE), LEFT)
    dv = warpgroup_mma(left, again(dout, shared.dout, dout_place), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    if PLAN.subtracting:
        exact = steep * dp
    else:
        exact = derivatives(steep, dp, shared.rows.index(PLAN.stages + place).load(SCORES), F)
    dhead = with_head_sums(dhead, exact, shared.rows, place, tile, F, PLAN, SCORES)
    ds = narrowed(exact, shared.ds, F)
    shared.ds.index(place).slice(NUMBER * 64, 64, dim=0).store(ds)
    wait_at("ds_full", 0, PLAN)
    fence_async_shared()  # for both consumers' ds, whose stores have ended at the barrier: it waits for none
    both = shared.ds.index(place)
    k = again(k, shared.k, 0)
    if DIM == 128:  # a consumer's half of dq is 64 columns
        dq = warpgroup_mma(both.permute((1, 0)), k.slice(NUMBER * 64, 64, dim=1), zero_dq, use_acc=False, is_async=True)
    else:  # a consumer's half of dq is 64 rows
        dq = warpgroup_mma(both.slice(NUMBER * 64, 64, dim=1).permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds, LEFT), again(q, shared.q, place), dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
    arrive_at_constant("dout_empty", place, PLAN)
    _hand_over(dq, shared, step, NUMBER, PLAN)
    dk = warpgroup_mma_wait(0, deps=[dk])
    arrive_at_constant("q_empty", place, PLAN)
    return dk, dv, dhead


@gluon.jit
def subtracted(product, shared, place, PLAN: gl.constexpr, SCORES: gl.constexpr):
    """Begins to subtract lse or delta of each query from a product, if `PLAN.subtracting`.

    Place `place` of `shared.parts` has the negative numbers in parts, and a product of ones and these parts is added.
    That takes half the time of reading the numbers of a quarter of the queries into the registers of every thread.
    """
    if PLAN.subtracting:
        ones = gl.full([64, 16], 1.0, shared.parts.dtype, gl.DotOperandLayout(0, SCORES, 2))
        return warpgroup_mma(ones, shared.parts.index(place).permute((1, 0)), product, is_async=True)
    else:
        return product


@gluon.jit
def _hand_over(dq, shared, step, NUMBER: gl.constexpr, PLAN: gl.constexpr):
    """Writes half a tile of dq to shared memory, in the order of `dq_order`, for the warp that adds dq to memory.

    That warp also makes the fence that must precede the read by TMA. A fence here would wait until everything is
    stored: some 270 of the 3,600 cycles of a step.
    """
    wait_at("dq_empty", NUMBER, PLAN)
    shared.dq.index(NUMBER).store(in_register_order(dq))
    arrive_at_constant("dq_full", step % 2, PLAN, 2 * NUMBER)


@gluon.jit
def _hand_over_result(sums, shared, step, NUMBER: gl.constexpr, GRADIENT, PLAN: gl.constexpr):
    """Writes `sums`, dk or dv of 64 keys, to shared memory, for the warp that would add dq of step number `step`."""
    TYPE: gl.constexpr = GRADIENT.dtype.element_ty
    wait_at("dq_empty", NUMBER, PLAN)
    result_place(shared, NUMBER, TYPE, sums.shape[1]).store(sums.to(TYPE))
    arrive_at_constant("dq_full", step % 2, PLAN, 2 * NUMBER)


@gluon.jit
def in_register_order(x):
    """Reorders a 64 by 64 product to `[16, 256]`, so that each thread stores 16 contiguous bytes at a time."""
    # Rows: 4 warps, 2 registers, 8 threads; columns: 8 registers, 4 threads, 2 registers.
    return gl.reshape(gl.permute(gl.reshape(x, (4, 2, 8, 8, 4, 2)), (3, 0, 2, 4, 1, 5)), (16, 256))
