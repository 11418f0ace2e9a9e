# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""Attention's backward pass in one Gluon kernel for Hopper: dk and dv in registers, dq added up in memory.

A program owns 128 keys. Its two groups of four warps hold 64 keys each, and S and dP are computed transposed
(keys as rows), so P and dS feed the products for dv and dk from registers. dq of a tile of 64 queries needs the
dS of both groups, which meet in shared memory; each group computes half of dq's columns. A warp of its own
adds dq to memory. Layout of q, k, v, do: [batch, length, heads, 128], bfloat16; `lse` is in base 2, `delta` is
rowsum(do * o), both [batch, heads, length], float32. Without `FRAG`, dq is float32 like q; with it, dq keeps the
order of the tensor cores' registers, so that a half tile is 16 KiB in one piece (`natural_order` undoes it).
"""

# ruff: noqa: SIM102, SIM108 (compile-time and run-time conditions stay apart)
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@builtin
def add_to_memory(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to device memory (Triton 3.6 has the operation, but no name for it)."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


def natural_order(dq, batch, heads, length):
    """Bring dq from the order of the registers (`FRAG`) to [batch, length, heads, 128] (a torch tensor)."""
    x = dq.view(batch, heads, length // 64, 2, 8, 4, 8, 4, 2, 2)
    return x.permute(0, 2, 5, 8, 6, 1, 3, 4, 7, 9).reshape(batch, length, heads, 128)


@gluon.jit
def _where(cfg: gl.constexpr):
    """The key tile, batch and head of this program, and its first query tile."""
    S: gl.constexpr = cfg[1]
    H: gl.constexpr = cfg[2]
    HG: gl.constexpr = cfg[9]
    NT: gl.constexpr = S // 128
    u = gl.program_id(0)
    r = u % (NT * HG)
    j = r // HG
    bh = (u // (NT * HG)) * HG + r % HG
    if cfg[3]:
        lo = j * 2
    else:
        lo = j * 0
    return j, bh // H, bh % H, lo


@gluon.jit
def _query(t, lo, j, cfg: gl.constexpr):
    """The t-th query tile; with ROT a full mask's walk starts at the diagonal and wraps."""
    if cfg[10]:
        i = (j * 2 + t) % (cfg[1] // 64)
    else:
        i = lo + t
    return i


@gluon.jit
def _give_dq(dq, dq_s, dqf, dqe, n, cfg: gl.constexpr, w: gl.constexpr):
    """Hand a half tile of dq to the warp that adds it to memory."""
    NDQ: gl.constexpr = cfg[8]
    slot = n % NDQ
    mbarrier.wait(dqe.index(slot * 2 + w), ((n // NDQ) & 1) ^ 1)
    if cfg[6]:
        x = dq.reshape((4, 2, 8, 8, 4, 2)).permute((3, 0, 2, 4, 1, 5)).reshape((16, 256))
        dq_s.index(slot * 2 + w).store(x)
    else:
        dq_s.index(slot * 2 + w).store(dq)
    fence_async_shared()
    mbarrier.arrive(dqf.index(slot * 2 + w), count=1)


@gluon.jit
def _consumer(
    w: gl.constexpr,
    k_s,
    v_s,
    q_s,
    o_s,
    ds_s,
    dq_s,
    l_s,
    d_s,
    kvf,
    qf,
    of,
    qe,
    oe,
    dsf,
    dqf,
    dqe,
    DK,
    DV,
    cfg: gl.constexpr,
):
    S: gl.constexpr = cfg[1]
    H: gl.constexpr = cfg[2]
    CAUSAL: gl.constexpr = cfg[3]
    scale: gl.constexpr = cfg[4]
    MODE: gl.constexpr = cfg[5]
    NDS: gl.constexpr = cfg[7]
    ST: gl.constexpr = cfg[11]
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    DL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DL, k_width=2)
    scale2: gl.constexpr = scale * 1.4426950408889634
    j, b, h, lo = _where(cfg)
    n = S // 64 - lo
    k_w = k_s.slice(w * 64, 64, dim=0)
    v_w = v_s.slice(w * 64, 64, dim=0)
    k_h = k_s.slice(w * 64, 64, dim=1)
    zero = gl.zeros([64, 64], gl.float32, SL)
    dk = gl.zeros([64, 128], gl.float32, DL)
    dv = gl.zeros([64, 128], gl.float32, DL)
    keys = j * 128 + w * 64 + gl.arange(0, 64, gl.SliceLayout(1, SL))
    mbarrier.wait(kvf, 0)
    for t in range(0, n):
        st = t % ST
        ph = (t // ST) & 1
        mbarrier.wait(qf.index(st), ph)
        s = warpgroup_mma(k_w, q_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(of.index(st), ph)
        dp = warpgroup_mma(v_w, o_s.index(st).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s * scale2 - l_s.index(st).load(SL))
        if CAUSAL:
            if t < 2:
                rows = (lo + t) * 64 + gl.arange(0, 64, gl.SliceLayout(0, SL))
                p = gl.where(rows[None, :] >= keys[:, None], p, 0.0)
        pb = gl.convert_layout(p.to(gl.bfloat16), PL)
        dp = warpgroup_mma_wait(0, deps=[dp])
        dv = warpgroup_mma(pb, o_s.index(st), dv, is_async=True)
        if MODE == 2:  # the previous tile's dq runs under this tile's dS
            if t > 0:
                mbarrier.wait(dsf.index((t - 1) % NDS), ((t - 1) // NDS) & 1)
            dq = warpgroup_mma(ds_s.index((t + NDS - 1) % NDS).permute((1, 0)), k_h, zero, use_acc=False, is_async=True)
        ds = (p * (dp - d_s.index(st).load(SL))).to(gl.bfloat16)
        if MODE == 1:
            # the other group has stored the previous dS, hence has done with the dq of two tiles before that
            if t > 0:
                mbarrier.wait(dsf.index((t - 1) % NDS), ((t - 1) // NDS) & 1)
        ds_s.index(t % NDS).slice(w * 64, 64, dim=0).store(ds)
        fence_async_shared()
        mbarrier.arrive(dsf.index(t % NDS), count=1)
        if MODE == 0:  # this tile's dq, then dk; dq leaves under dk
            mbarrier.wait(dsf.index(t % NDS), (t // NDS) & 1)
            dq = warpgroup_mma(ds_s.index(t % NDS).permute((1, 0)), k_h, zero, use_acc=False, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(ds, PL), q_s.index(st), dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
            mbarrier.arrive(oe.index(st), count=1)
            _give_dq(dq, dq_s, dqf, dqe, t, cfg, w)
        elif MODE == 3:  # dk first: it covers the wait for the other group; nothing covers dq's way out
            dk = warpgroup_mma(gl.convert_layout(ds, PL), q_s.index(st), dk, is_async=True)
            mbarrier.wait(dsf.index(t % NDS), (t // NDS) & 1)
            dq = warpgroup_mma(ds_s.index(t % NDS).permute((1, 0)), k_h, zero, use_acc=False, is_async=True)
            dv, dk = warpgroup_mma_wait(1, deps=[dv, dk])
            mbarrier.arrive(oe.index(st), count=1)
            mbarrier.arrive(qe.index(st), count=1)
            dq = warpgroup_mma_wait(0, deps=[dq])
            _give_dq(dq, dq_s, dqf, dqe, t, cfg, w)
        elif MODE == 1:  # the previous tile's dq, then dk; dq leaves under dk (the first tile's is dropped)
            dq = warpgroup_mma(ds_s.index((t + NDS - 1) % NDS).permute((1, 0)), k_h, zero, use_acc=False, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(ds, PL), q_s.index(st), dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
            mbarrier.arrive(oe.index(st), count=1)
            if t > 0:
                _give_dq(dq, dq_s, dqf, dqe, t - 1, cfg, w)
        elif MODE == 2:
            dk = warpgroup_mma(gl.convert_layout(ds, PL), q_s.index(st), dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
            mbarrier.arrive(oe.index(st), count=1)
            if t > 0:
                _give_dq(dq, dq_s, dqf, dqe, t - 1, cfg, w)
        else:  # no dq at all: four products
            dk = warpgroup_mma(gl.convert_layout(ds, PL), q_s.index(st), dk, is_async=True)
            dv = warpgroup_mma_wait(1, deps=[dv])
            mbarrier.arrive(oe.index(st), count=1)
        if MODE != 3:
            dk = warpgroup_mma_wait(0, deps=[dk])
            mbarrier.arrive(qe.index(st), count=1)
    if MODE == 1 or MODE == 2:
        mbarrier.wait(dsf.index((n - 1) % NDS), ((n - 1) // NDS) & 1)
        dq = warpgroup_mma(ds_s.index((n - 1) % NDS).permute((1, 0)), k_h, zero, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _give_dq(dq, dq_s, dqf, dqe, n - 1, cfg, w)
    rows = j * 128 + w * 64 + gl.arange(0, 64, gl.SliceLayout(1, DL))
    at = (b * S + rows)[:, None].to(gl.int64) * (H * 128) + h * 128 + gl.arange(0, 128, gl.SliceLayout(0, DL))[None, :]
    gl.store(DK + at, (dk * scale).to(gl.bfloat16))
    gl.store(DV + at, dv.to(gl.bfloat16))


@gluon.jit
def _writer(dq_s, dqf, dqe, dqd, cfg: gl.constexpr):
    """Add dq's half tiles to memory as they come."""
    S: gl.constexpr = cfg[1]
    H: gl.constexpr = cfg[2]
    NDQ: gl.constexpr = cfg[8]
    j, b, h, lo = _where(cfg)
    if cfg[5] != 5:
        for t in range(0, S // 64 - lo):
            i = _query(t, lo, j, cfg)
            slot = t % NDQ
            for w in gl.static_range(2):
                mbarrier.wait(dqf.index(slot * 2 + w), (t // NDQ) & 1)
                if cfg[12]:
                    if cfg[6]:
                        add_to_memory(dqd, [(((b * H + h) * (S // 64) + i) * 2 + w) * 16, 0], dq_s.index(slot * 2 + w))
                    else:
                        add_to_memory(dqd, [b * S + i * 64, h * 128 + w * 64], dq_s.index(slot * 2 + w))
            for w in gl.static_range(2):
                tma.store_wait(1 - w)
                mbarrier.arrive(dqe.index(slot * 2 + w), count=1)
        tma.store_wait(0)


@gluon.jit
def _producer(k_s, v_s, q_s, o_s, l_s, d_s, kvf, qf, of, qe, oe, qd, od, kd, vd, ld, dd, cfg: gl.constexpr):
    S: gl.constexpr = cfg[1]
    H: gl.constexpr = cfg[2]
    ST: gl.constexpr = cfg[11]
    j, b, h, lo = _where(cfg)
    mbarrier.expect(kvf, 128 * 128 * 2 * 2)
    tma.async_copy_global_to_shared(kd, [b * S + j * 128, h * 128], kvf, k_s)
    tma.async_copy_global_to_shared(vd, [b * S + j * 128, h * 128], kvf, v_s)
    for t in range(0, S // 64 - lo):
        i = _query(t, lo, j, cfg)
        st = t % ST
        ph = ((t // ST) & 1) ^ 1
        mbarrier.wait(qe.index(st), ph)
        mbarrier.expect(qf.index(st), 64 * 128 * 2 + 64 * 4)
        tma.async_copy_global_to_shared(qd, [b * S + i * 64, h * 128], qf.index(st), q_s.index(st))
        tma.async_copy_global_to_shared(ld, [b * H + h, i * 64], qf.index(st), l_s.index(st))
        mbarrier.wait(oe.index(st), ph)
        mbarrier.expect(of.index(st), 64 * 128 * 2 + 64 * 4)
        tma.async_copy_global_to_shared(od, [b * S + i * 64, h * 128], of.index(st), o_s.index(st))
        tma.async_copy_global_to_shared(dd, [b * H + h, i * 64], of.index(st), d_s.index(st))


@gluon.jit
def one_pass(Q, K, V, DO, LSE, DELTA, DQ, DK, DV, cfg: gl.constexpr):
    """cfg: B, S, H, CAUSAL, scale, MODE, FRAG, NDS, NDQ, HG, ROT, ST, RED."""
    B: gl.constexpr = cfg[0]
    S: gl.constexpr = cfg[1]
    H: gl.constexpr = cfg[2]
    NDS: gl.constexpr = cfg[7]
    NDQ: gl.constexpr = cfg[8]
    ST: gl.constexpr = cfg[11]
    QL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    KL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], gl.bfloat16)
    TL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    LL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    qd = tma.make_tensor_descriptor(Q, [B * S, H * 128], [H * 128, 1], [64, 128], QL)
    od = tma.make_tensor_descriptor(DO, [B * S, H * 128], [H * 128, 1], [64, 128], QL)
    kd = tma.make_tensor_descriptor(K, [B * S, H * 128], [H * 128, 1], [128, 128], KL)
    vd = tma.make_tensor_descriptor(V, [B * S, H * 128], [H * 128, 1], [128, 128], KL)
    ld = tma.make_tensor_descriptor(LSE, [B * H, S], [S, 1], [1, 64], LL)
    dd = tma.make_tensor_descriptor(DELTA, [B * H, S], [S, 1], [1, 64], LL)
    if cfg[6]:
        dqd = tma.make_tensor_descriptor(DQ, [B * S * H // 2, 256], [256, 1], [16, 256], LL)
        dq_s = gl.allocate_shared_memory(gl.float32, [NDQ * 2, 16, 256], LL)
    else:
        FL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
        dqd = tma.make_tensor_descriptor(DQ, [B * S, H * 128], [H * 128, 1], [64, 64], FL)
        dq_s = gl.allocate_shared_memory(gl.float32, [NDQ * 2, 64, 64], FL)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [128, 128], KL)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [128, 128], KL)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [ST, 64, 128], QL)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [ST, 64, 128], QL)
    ds_s = gl.allocate_shared_memory(gl.bfloat16, [NDS, 128, 64], TL)
    l_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], LL)
    d_s = gl.allocate_shared_memory(gl.float32, [ST, 1, 64], LL)
    BL: gl.constexpr = mbarrier.MBarrierLayout()
    kvf = gl.allocate_shared_memory(gl.int64, [1], BL)
    qf = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    of = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    qe = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    oe = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    dsf = gl.allocate_shared_memory(gl.int64, [NDS, 1], BL)
    dqf = gl.allocate_shared_memory(gl.int64, [NDQ * 2, 1], BL)
    dqe = gl.allocate_shared_memory(gl.int64, [NDQ * 2, 1], BL)
    mbarrier.init(kvf, count=1)
    for s in gl.static_range(ST):
        mbarrier.init(qf.index(s), count=1)
        mbarrier.init(of.index(s), count=1)
        mbarrier.init(qe.index(s), count=2)
        mbarrier.init(oe.index(s), count=2)
    for s in gl.static_range(NDS):
        mbarrier.init(dsf.index(s), count=2)
    for s in gl.static_range(NDQ * 2):
        mbarrier.init(dqf.index(s), count=1)
        mbarrier.init(dqe.index(s), count=1)
    gl.warp_specialize(
        [
            (_consumer, (0, k_s, v_s, q_s, o_s, ds_s, dq_s, l_s, d_s, kvf, qf, of, qe, oe, dsf, dqf, dqe, DK, DV, cfg)),
            (_consumer, (1, k_s, v_s, q_s, o_s, ds_s, dq_s, l_s, d_s, kvf, qf, of, qe, oe, dsf, dqf, dqe, DK, DV, cfg)),
            (_producer, (k_s, v_s, q_s, o_s, l_s, d_s, kvf, qf, of, qe, oe, qd, od, kd, vd, ld, dd, cfg)),
            (_writer, (dq_s, dqf, dqe, dqd, cfg)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
