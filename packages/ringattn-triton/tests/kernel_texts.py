# SPDX-License-Identifier: Apache-2.0
"""Writes the PTX of the Hopper kernels, without debug lines, to a folder. No GPU is needed.

`JAX_PLATFORMS=cpu PYTHONPATH=tests python packages/ringattn-triton/tests/kernel_texts.py FOLDER [CASE ...]`

A change that should change no kernel leaves `diff -r` of the folders before and after empty.
"""

import re
import sys
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import random_blocks
from compile_reports import _calls, _fields
from ringattn_core.contract.protocol import Block, Partial
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.launch import compiling_for

LENGTH: Final = 8192
CAUSAL: Final[dict[str, Any]] = {"causal": True}
IDS: Final = np.repeat(np.arange(4, dtype=np.int32), LENGTH // 4)[None]
SLOPES: Final = {"slopes": np.full((1, 16), 0.1, np.float32)}
DROPPED: Final[dict[str, Any]] = {"dropout_prob": 0.1, "seed": np.uint32([3])}
CASES: Final[dict[str, dict[str, Any]]] = {
    "64": {"dim": 64} | CAUSAL,
    "64-documents": {"dim": 64, "q_segments": IDS, "kv_segments": IDS, "fused": True} | CAUSAL,
    "64-rows": {"dim": 64, "length": 1024},
    "96-window": {"dim": 96, "sliding_window": (300, 0)} | CAUSAL,
    "128": {"dim": 128, "kv_heads": 4} | CAUSAL,
    "128-float16": {"dim": 128, "dtype": jnp.float16, "length": 8000} | CAUSAL,
    "128-cap": {"dim": 128, "logits_soft_cap": 50.0} | CAUSAL,
    "128-sinks": {"dim": 128, "sinks": True} | CAUSAL,
    "128-slopes": {"dim": 128} | SLOPES | CAUSAL,
    "128-dropout": {"dim": 128} | DROPPED | CAUSAL,
    "128-bias": {"dim": 128, "bias": np.zeros((1, 1, LENGTH, LENGTH), np.float32).astype(jnp.bfloat16)} | CAUSAL,
    "192": {"dim": 192} | CAUSAL,
    "192-128": {"dim": 192, "value_dim": 128} | CAUSAL,
    "256": {"dim": 256} | CAUSAL,
}


class _Zeros:
    """In place of a generator of random numbers: which numbers a block holds changes no kernel."""

    def normal(self, size: Any) -> np.ndarray:
        return np.broadcast_to(np.float32(0), size)


def programs(case: dict[str, Any]) -> list[Any]:
    """The forward pass that continues nothing, and the backward pass, lowered for an H100."""
    fields = {"heads": 16, "dtype": jnp.bfloat16} | case
    length, sinks, fused = (fields.pop(n, x) for n, x in (("length", LENGTH), ("sinks", False), ("fused", False)))
    if fused:
        fields["fused_backward"] = True
    block = random_blocks.make_block(1, length, length, **fields)
    rows = jax.ShapeDtypeStruct((1, block.q.shape[2], length), jnp.float32)
    dout = jax.ShapeDtypeStruct((*block.q.shape[:3], block.value_dim), block.q.dtype)

    def forward(block: Block, lse: Any) -> Any:
        return KERNEL.forward(block, Partial(None, lse) if sinks else None)

    def backward(block: Block, dout: Any, lse: Any) -> Any:
        return KERNEL.backward(block, dout, lse, lse, None)

    with compiling_for(90):
        traced = [jax.jit(forward).trace(block, rows), jax.jit(backward).trace(block, dout, rows)]
        return [x.lower(lowering_platforms=("cuda",)) for x in traced[: 1 if sinks else 2]]


def texts(lowered: Any) -> list[tuple[str, str]]:
    """The name and the PTX of each kernel that a program launches."""
    found = []
    for message in _calls(lowered.compiler_ir().operation):
        call = _fields(message)
        ptx = _fields(_fields(call[1])[1])[4].decode()
        lines = [line for line in ptx.split("\t.section\t.debug")[0].splitlines() if not _DEBUG.match(line)]
        found.append((call[4].decode(), "\n".join(re.sub(r"\s*//.*|\$L__\w+", "", line) for line in lines)))
    return found


_DEBUG: Final = re.compile(r"\s*(\.loc|\.file|//|\$L__(tmp|func))")


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    folder.mkdir(parents=True, exist_ok=True)
    random_blocks.np.random.default_rng = lambda _: _Zeros()
    for name in names:
        for number, lowered in enumerate(programs(CASES[name])):
            for kernel, text in texts(lowered):
                (folder / f"{name}-{number}-{kernel}.ptx").write_text(text)
                print(name, kernel, len(text), flush=True)


if __name__ == "__main__":
    main()
