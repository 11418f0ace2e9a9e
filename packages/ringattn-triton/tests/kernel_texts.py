# SPDX-License-Identifier: Apache-2.0
"""Writes the PTX of the Triton and Gluon kernels, without debug lines, to a folder. No GPU is needed.

`JAX_PLATFORMS=cpu python packages/ringattn-triton/tests/kernel_texts.py FOLDER [CASE ...]`

A change that should change no kernel leaves `diff -r` of the folders before and after empty.
"""

import dataclasses
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
FIRST, MIDDLE = ({"hop": hop} | CAUSAL for hop in ("first", "middle"))
FUSED: Final = {"fused": True}
IDS: Final = np.arange(2 * LENGTH, dtype=np.int32).reshape(2, LENGTH) // 2000
DOCUMENTS: Final = {"batch": 2, "q_segments": IDS, "kv_segments": IDS} | CAUSAL
SLOPES: Final = {"slopes": np.full((1, 16), 0.1, np.float32)}
DROPPED: Final[dict[str, Any]] = {"dropout_prob": 0.1, "seed": np.uint32([3])}
CAPPED: Final = {"logits_soft_cap": 50.0}
WINDOW: Final = {"sliding_window": (300, 0)} | CAUSAL
BIAS: Final = {"bias": np.zeros((1, 1, LENGTH, LENGTH), np.float32).astype(jnp.bfloat16)}
SHORT_BIAS: Final = {"bias": np.zeros((2, 16, 1024, 1024), np.float32), "length": 1024, "batch": 2}
BY_HEAD: Final = {"kv_range": (np.zeros((1, 16, LENGTH), np.int32), np.full((1, 16, LENGTH), LENGTH, np.int32))}
EVERYTHING: Final = {"sliding_window": (300, 20), "mask": np.ones((1, 1, 1000, 1000), bool), "length": 1000} | CAUSAL
CHOSEN: Final = {"selected": np.zeros((1, LENGTH, 4, 4), np.int32), "kv_heads": 4} | CAUSAL
FLOAT32: Final = {"dtype": jnp.float32, "length": 1024}
CASES: Final[dict[str, dict[str, Any]]] = {
    "64": {"dim": 64, "heads": 32} | CAUSAL,
    "64-middle": {"dim": 64, "heads": 32, "length": 8000} | MIDDLE,
    "64-documents": {"dim": 64} | FUSED | DOCUMENTS,
    "64-rows": {"dim": 64, "length": 1024},
    "64-unordered": {"dim": 64, "hop": "first"} | FUSED | WINDOW,
    "96-window": {"dim": 96} | WINDOW,
    "96-middle": {"dim": 96, "kv_heads": 8} | MIDDLE,
    "128": {"dim": 128, "kv_heads": 4} | CAUSAL,
    "128-first": {"dim": 128, "kv_heads": 4} | FIRST,
    "128-middle": {"dim": 128} | MIDDLE,
    "128-max-middle": {"dim": 128, "max_logits": True} | MIDDLE,
    "128-unordered": {"dim": 128} | FUSED | CAUSAL,
    "128-abreast": {"dim": 128, "kv_heads": 2} | CAUSAL,
    "128-documents": {"dim": 128} | DOCUMENTS,
    "128-by-head": {"dim": 128} | BY_HEAD,
    "128-float16": {"dim": 128, "dtype": jnp.float16, "length": 8000} | CAUSAL,
    "128-cap": {"dim": 128} | CAPPED | CAUSAL,
    "128-cap-middle": {"dim": 128} | CAPPED | MIDDLE,
    "128-cap-sinks": {"dim": 128, "sinks": True, "max_logits": True} | CAPPED | WINDOW,
    "128-sinks": {"dim": 128, "sinks": True} | CAUSAL,
    "128-max": {"dim": 128, "max_logits": True} | CAUSAL,
    "128-slopes": {"dim": 128} | SLOPES | CAUSAL,
    "128-slopes-middle": {"dim": 128, "length": 8000, "hop": "middle"} | SLOPES,
    "128-slopes-cap": {"dim": 128} | SLOPES | CAPPED | CAUSAL,
    "128-dropout": {"dim": 128} | DROPPED | CAUSAL,
    "128-dropout-middle": {"dim": 128, "length": 8000} | DROPPED | SLOPES | MIDDLE,
    "128-bias": {"dim": 128} | BIAS | CAUSAL,
    "128-bias-fixed": {"dim": 128, "bias_fixed": True} | BIAS | MIDDLE,
    "128-mask": {"dim": 128, "mask": np.ones((1, 1, LENGTH, LENGTH), bool)} | CAUSAL,
    "128-chosen": {"dim": 128, "selected_size": 64} | CHOSEN,
    "128-chosen-16": {"dim": 128, "selected_size": 16} | CHOSEN,
    "128-chosen-grouped": {"dim": 128, "selected_size": 64, "heads": 32} | CHOSEN,
    "160": {"dim": 160} | MIDDLE,
    "192": {"dim": 192} | CAUSAL,
    "192-128": {"dim": 192, "value_dim": 128} | CAUSAL,
    "192-128-first": {"dim": 192, "value_dim": 128} | FIRST,
    "192-window": {"dim": 192, "length": 8000} | WINDOW,
    "192-slopes": {"dim": 192} | SLOPES | CAUSAL,
    "192-dropout": {"dim": 192} | DROPPED | CAUSAL,
    "256": {"dim": 256} | CAUSAL,
    "256-128": {"dim": 256, "value_dim": 128} | CAUSAL,
    "256-unordered": {"dim": 256} | FUSED | MIDDLE,
    "256-documents": {"dim": 256, "kv_heads": 4} | DOCUMENTS,
    "portable": {"dim": 64} | FLOAT32 | CAUSAL,
    "portable-middle": {"dim": 80, "value_dim": 48, "max_logits": True} | FLOAT32 | MIDDLE,
    "portable-bias": {"dim": 64, "heads": 16} | FLOAT32 | SHORT_BIAS | CAUSAL,
    "portable-everything": {"dim": 40} | CAPPED | SLOPES | DROPPED | EVERYTHING,
    "portable-documents": {"dim": 32} | DOCUMENTS,
    "portable-shared": {"dim": 32, "kv_heads": 2, "sliding_window": (127, 0)} | CAUSAL,
    "few": {"dim": 128, "q_length": 1, "kv_heads": 2},
    "few-middle": {"dim": 64, "q_length": 2, "kv_heads": 2, "hop": "middle"} | WINDOW,
}
"""Fields of `random_blocks.make_block`, and some more: `fused`, `sinks`, `max_logits`, and `hop`, which hop of a ring
computes the block. Without `hop` the ring has one device, and results are final. A first hop continues nothing."""


class _Zeros:
    """In place of a generator of random numbers: which numbers a block holds changes no kernel."""

    def normal(self, size: Any) -> np.ndarray:
        return np.broadcast_to(np.float32(0), size)


def traced(case: dict[str, Any]) -> list[Any]:
    """The forward pass, and the backward pass if the case has no sinks (then it is that of the case without)."""
    fields = {"heads": 16, "dtype": jnp.bfloat16} | case
    more = {"length": LENGTH, "batch": 1, "hop": None, "fused": False, "sinks": False, "max_logits": False}
    length, batch, hop, fused, sinks, largest = (fields.pop(name, value) for name, value in more.items())
    fields |= {"fused_backward": fused, "return_max_logits": largest, "final": hop is None}
    block = random_blocks.make_block(batch, fields.pop("q_length", length), length, **fields)
    block = block if hop else dataclasses.replace(block, kv=(block.k, block.v))
    of_rows = jax.ShapeDtypeStruct((batch, block.q.shape[2], block.q_length), jnp.float32)
    dout = jax.ShapeDtypeStruct((*block.q.shape[:3], block.value_dim), block.q.dtype)
    continued = hop == "middle"
    out = jax.ShapeDtypeStruct(dout.shape, jnp.float32) if continued else None
    before = Partial(out, of_rows, of_rows if largest else None) if continued or sinks else None
    dq = jax.ShapeDtypeStruct(block.q.shape, jnp.float32) if continued else None

    def forward(block: Block, before: Partial | None) -> Any:
        return KERNEL.forward(block, before)

    def backward(block: Block, dout: Any, of_rows: Any, dq: Any) -> Any:
        return KERNEL.backward(block, dout, of_rows, of_rows, dq)

    found = [jax.jit(forward).trace(block, before)]
    return found if sinks else [*found, jax.jit(backward).trace(block, dout, of_rows, dq)]


def texts(program: Any) -> dict[str, str]:
    """The PTX of each kernel that a traced program launches, compiled anew, without debug lines."""
    found, original = {}, compiled.compile_kernel

    def kept(call: Any, *rest: Any) -> Any:
        if (call, *rest) not in found:
            found[call, *rest] = original.__wrapped__(call, *rest)
        return found[call, *rest]

    compiled.compile_kernel = kept
    try:
        program.lower(lowering_platforms=("cuda",))
    finally:
        compiled.compile_kernel = original
    return {
        f"{number}-{call.name}": _without_debug(made.code) for number, ((call, *_), made) in enumerate(found.items())
    }


def _without_debug(code: str) -> str:
    lines = [line for line in code.split("\t.section\t.debug")[0].splitlines() if not _DEBUG.match(line)]
    return "\n".join(re.sub(r"\s*//.*|\$L__\w+", "", line) for line in lines)


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
