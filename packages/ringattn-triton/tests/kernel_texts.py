# SPDX-License-Identifier: Apache-2.0
"""Writes the PTX of the Hopper kernels, without debug lines, to a folder. No GPU is needed.

`JAX_PLATFORMS=cpu python packages/ringattn-triton/tests/kernel_texts.py FOLDER [CASE ...]`

A change that should change no kernel leaves `diff -r` of the folders before and after empty.
"""

import re
import sys
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core.contract.protocol import Block, Partial
from ringattn_testing import random_blocks
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.launch import compiled, compiling_for

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


def traced(case: dict[str, Any]) -> list[Any]:
    """The forward pass that continues nothing, or begins from sinks, and the backward pass."""
    fields = {"heads": 16, "dtype": jnp.bfloat16} | case
    length, sinks, fused = (fields.pop(n, x) for n, x in (("length", LENGTH), ("sinks", False), ("fused", False)))
    block = random_blocks.make_block(1, length, length, **fields, **({"fused_backward": True} if fused else {}))
    rows = jax.ShapeDtypeStruct((1, block.q.shape[2], length), jnp.float32)
    dout = jax.ShapeDtypeStruct((*block.q.shape[:3], block.value_dim), block.q.dtype)

    def forward(block: Block, lse: Any) -> Any:
        return KERNEL.forward(block, Partial(None, lse) if sinks else None)

    def backward(block: Block, dout: Any, lse: Any) -> Any:
        return KERNEL.backward(block, dout, lse, lse, None)

    found = [jax.jit(forward).trace(block, rows)]
    return found if sinks else [*found, jax.jit(backward).trace(block, dout, rows)]


def texts(program: Any) -> dict[str, str]:
    """The PTX of each kernel that a traced program launches, compiled anew, without debug lines."""
    found, original = {}, compiled.compile_kernel

    def kept(call: Any, *rest: Any) -> Any:
        made = original.__wrapped__(call, *rest)
        lines = [line for line in made.code.split("\t.section\t.debug")[0].splitlines() if not _DEBUG.match(line)]
        found[call.name] = "\n".join(re.sub(r"\s*//.*|\$L__\w+", "", line) for line in lines)
        return made

    compiled.compile_kernel = kept
    try:
        program.lower(lowering_platforms=("cuda",))
    finally:
        compiled.compile_kernel = original
    return found


_DEBUG: Final = re.compile(r"\s*(\.loc|\.file|//|\$L__(tmp|func))")


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    folder.mkdir(parents=True, exist_ok=True)
    random_blocks.np.random.default_rng = lambda _: _Zeros()
    for name in names:
        with compiling_for(90):
            for number, program in enumerate(traced(CASES[name])):
                for kernel, text in texts(program).items():
                    (folder / f"{name}-{number}-{kernel}.ptx").write_text(text)
                    print(name, kernel, len(text), flush=True)


if __name__ == "__main__":
    main()
