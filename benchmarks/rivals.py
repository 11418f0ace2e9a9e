# SPDX-License-Identifier: Apache-2.0
"""Ours beside every other kernel that is installed and takes the case: FlashAttention-3, cuDNN, and PyTorch's.

All candidates run in turns in one process, so that a GPU that gets hot slows all alike. PyTorch's attention is called
on tensors that share the arrays' memory, and timed by the same clock.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Final

import flash_attention_3
import jax
from interleaved import ON_A_DEVICE, medians
from programs import ours, with_gradients
from shapes import CASES, WORK, Case

OURS: Final = "ours"


def candidates(case: Case, part: str, backend: str) -> dict[str, Callable[[], Any]]:
    """A program without arguments for each kernel that takes the case."""
    attentions: dict[str, Any] = {OURS: ours(backend=backend, **case.options())}
    if part != "forward":
        # The default keeps the bits of every run; this form need not, as its rivals do not.
        attentions["ours, unordered"] = ours(backend=backend, fused_backward=True, **case.options())
    if flash_attention_3.why_not(case) is None:
        attentions["FlashAttention-3"] = flash_attention_3.attend(case)
    if not (case.document or case.sinks or case.shape.tokens % 64):
        cudnn: dict[str, Any] = {"is_causal": case.causal, "implementation": "cudnn"}
        if case.window:
            cudnn["local_window_size"] = case.window
        attentions["cuDNN"] = functools.partial(jax.nn.dot_product_attention, **cudnn)
    programs = {name: _compiled(attention, case, part) for name, attention in attentions.items()}
    if importlib.util.find_spec("torch") is not None and not (case.window or case.document or case.sinks):
        programs["PyTorch"] = _of_torch(case, part)
    return programs


def _compiled(attention: Any, case: Case, part: str) -> Callable[[], Any]:
    q, k, v, dout = case.shape.arrays()
    arrays = (q, k, v, *case.extras())
    program = attention
    if part != "forward":
        arrays, program = (*arrays, dout), with_gradients(attention)
    compiled = jax.jit(program).lower(*arrays).compile()
    return lambda: compiled(*arrays)


def _of_torch(case: Case, part: str) -> Callable[[], Any]:
    """PyTorch's own choice of kernel, on the same numbers."""
    import torch  # pyright: ignore[reportMissingImports]

    q, k, v, dout = (torch.from_dlpack(x).transpose(1, 2) for x in case.shape.arrays())
    for x in (q, k, v):
        x.requires_grad_(part != "forward")
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=case.causal,
        enable_gqa=case.shape.heads != case.shape.kv_heads,
    )

    def run() -> Any:
        out = attend(q, k, v)
        if part != "forward":
            out = torch.autograd.grad(out, (q, k, v), dout)
        return _Finished(torch)

    return run


class _Finished:
    """What `jax.block_until_ready` waits for in place of an array."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def block_until_ready(self) -> "_Finished":
        self._torch.cuda.synchronize()
        return self


def compare(names: Sequence[str], backend: str, rounds: int) -> None:
    """Prints a line for each case and part: TFLOP/s of each kernel, and ours over the best of the others."""
    for name in names:
        case = CASES[name]
        for part in WORK:
            seconds = medians(candidates(case, part, backend), rounds, ON_A_DEVICE)
            rates = {who: case.shape.tera(part, case.share) / time for who, time in seconds.items()}
            mine = {who: rate for who, rate in rates.items() if who.startswith(OURS)}
            best = max((rate for who, rate in rates.items() if who not in mine), default=None)
            ratios = " and ".join(f"{rate / best:.2f}" for rate in mine.values()) if best else ""
            figures = ", ".join(f"{who} {rate:.0f}" for who, rate in rates.items())
            beside = "" if best is None else f"; ours over the best of the others {ratios}"
            print(f"{name}, {part}: TFLOP/s {figures}{beside}", flush=True)
