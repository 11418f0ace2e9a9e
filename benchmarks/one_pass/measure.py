# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""Check and time the variants of the one-pass backward against cuDNN's, in turn in one process (needs torch)."""

import functools
import statistics
import sys

import torch
import triton
from kernel import natural_order, one_pass

triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))


def prepare(batch, length, heads, causal):
    """Random inputs, the row statistics, and room for the results."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(batch, length, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    lse = torch.empty(batch, heads, length, device="cuda")
    delta = torch.empty_like(lse)
    for b in range(batch):
        for h in range(heads):
            for at in range(0, length, 2048):
                s = q[b, at : at + 2048, h].float() @ k[b, :, h].float().T * 128**-0.5
                if causal:
                    rows = torch.arange(at, at + s.shape[0], device="cuda")[:, None]
                    s = s.masked_fill(rows < torch.arange(length, device="cuda")[None], float("-inf"))
                lse[b, h, at : at + 2048] = torch.logsumexp(s, 1)
                o = torch.softmax(s, 1) @ v[b, :, h].float()
                delta[b, h, at : at + 2048] = (o * do[b, at : at + 2048, h].float()).sum(1)
    dq = torch.zeros(batch, length, heads, 128, device="cuda")
    return [q, k, v, do, lse * 1.4426950408889634, delta, dq, torch.empty_like(k), torch.empty_like(v)]


def launch(args, causal, mode=0, frag=1, nds=2, ndq=1, hg=2, rot=0, st=2, red=1, regs=168):
    """One backward pass (dq is added to what is there)."""
    batch, length, heads, _ = args[0].shape
    cfg = (batch, length, heads, causal, 128**-0.5, mode, frag, nds, ndq, hg, rot, st, red)
    one_pass[(batch * heads * length // 128,)](*args, cfg, num_warps=4, maxnreg=regs)


def errors(args, causal, **options):
    """Largest relative errors (Frobenius) of dq, dk, dv against float32 attention's gradient."""
    batch, length, heads, _ = args[0].shape
    args[6].zero_()
    launch(args, causal, **options)
    dq = natural_order(args[6], batch, heads, length) if options.get("frag", 1) else args[6]
    q, k, v = (x.float().transpose(1, 2).requires_grad_() for x in args[:3])
    s = q @ k.transpose(2, 3) * 128**-0.5
    if causal:
        s = s.masked_fill(torch.ones(length, length, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    want = torch.autograd.grad(torch.softmax(s, 3) @ v, (q, k, v), args[3].float().transpose(1, 2))
    got = (dq * 128**-0.5, args[7].float(), args[8].float())
    return [((g - w.transpose(1, 2)).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]


def interleaved(runs, rounds=5, repeats=4):
    """Median milliseconds of each run, all in turn."""
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            for _ in range(repeats):
                run()
            b.record()
            torch.cuda.synchronize()
            times[name].append(a.elapsed_time(b) / repeats)
    return {name: (statistics.median(t), min(t), max(t)) for name, t in times.items()}


def convert(dq):
    """dq in its natural order, scaled, in bfloat16."""
    return (natural_order(dq, 1, 16, 16384) * 128**-0.5).to(torch.bfloat16)


def cudnn(args, causal):
    """cuDNN's backward on the same inputs, with all that belongs to it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, do = (x.transpose(1, 2).detach() for x in args[:4])
    for x in (q, k, v):
        x.requires_grad_()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(out, (q, k, v), do, retain_graph=True)


VARIANTS = {
    "dq now, natural order": dict(mode=0, frag=0),
    "dq now": dict(mode=0),
    "dq now, 2 dq buffers": dict(mode=0, ndq=2),
    "dk first": dict(mode=3),
    "dk first, natural order": dict(mode=3, frag=0),
    "previous dq, natural order": dict(mode=1, nds=3, frag=0),
    "previous dq": dict(mode=1, nds=3),
    "previous dq under dS": dict(mode=2, nds=3),
    "dq now, HG 1": dict(mode=0, hg=1),
    "dq now, HG 4": dict(mode=0, hg=4),
    "dk first, HG 1": dict(mode=3, hg=1),
    "dq now, natural order, HG 1": dict(mode=0, frag=0, hg=1),
    "previous dq, HG 1": dict(mode=1, nds=3, hg=1),
    "dq now, not written, HG 1": dict(mode=0, hg=1, red=0),
    "dq now, not written": dict(mode=0, red=0),
    "previous dq, not written": dict(mode=1, nds=3, red=0),
    "no dq (4 products)": dict(mode=5),
}


def main():
    """Correctness at 1024 tokens, then times at 16384."""
    wanted = sys.argv[1:] or list(VARIANTS)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    good = []
    for name in wanted:
        try:
            found = [errors(prepare(2, 1024, 4, c), c, **VARIANTS[name]) for c in (True, False)]
            print(
                f"{name:28s} dq, dk, dv: causal",
                *[f"{e:.4f}" for e in found[0]],
                "full",
                *[f"{e:.4f}" for e in found[1]],
                flush=True,
            )
            good.append(name)
        except Exception as e:  # one bad variant must not end the sweep
            print(name, "FAILED", repr(e)[:500], flush=True)
    for causal in (True, False):
        args = prepare(1, 16384, 16, causal)
        runs = {name: functools.partial(launch, args, causal, **VARIANTS[name]) for name in good}
        if not causal:
            runs["dq now, rotated start"] = functools.partial(launch, args, causal, mode=0, rot=1)
        try:
            runs["cuDNN, whole backward"] = cudnn(args, causal)
            runs["cuDNN, whole backward"]()
        except Exception as e:
            runs.pop("cuDNN, whole backward", None)
            print("no cuDNN:", repr(e)[:300])
        runs["zero dq"] = args[6].zero_
        runs["dq to bfloat16"] = functools.partial(convert, args[6])
        flops = 5 * 2 * 16384**2 * 128 * 16 / (2 if causal else 1)
        print("causal" if causal else "full", "16384 tokens, 16 heads of 128")
        for name, (mid, low, high) in interleaved(runs).items():
            print(f"{name:28s} {mid:7.3f} ms ({low:.3f}-{high:.3f}) {flops / mid / 1e9:5.0f} TFLOP/s of 5", flush=True)


if __name__ == "__main__":
    main()
