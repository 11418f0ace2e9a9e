# SPDX-License-Identifier: Apache-2.0
"""What the compilers make of the Hopper kernels without each of `hopper/workarounds.py`; no GPU is needed.

`JAX_PLATFORMS=cpu python benchmarks/upstream/hopper_assembler.py [WORKAROUND ...]`

Prints a number with and without the workaround, less is better in both cases. The exit status is 1 once one may go: the
two numbers are then equal. `again` is for Triton after 3.6: with 3.6 its numbers are equal, and do not count.
`arrive_at_constant` and `after_barriers` are not here: what they avoid is seen only in time.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import triton.backends.nvidia
from ringattn_testing import random_blocks
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.launch import compiled, compiling_for
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_BIN: Final = Path(triton.backends.nvidia.__file__).parent / "bin"
LENGTH: Final = 8192
IDS: Final = np.repeat(np.arange(4, dtype=np.int32), LENGTH // 4)[None]


@gluon.jit
def _nothing(step):
    pass


@gluon.jit
def _same(x, _):
    return x


@gluon.jit
def _zero():
    return 0


@gluon.jit
def _place(place, places, number):
    return place


@gluon.jit
def _selected(s, x, y):
    return gl.where(x == y, s, -float("inf"))


def assembled(ptx: str) -> tuple[int, list[str]]:
    """The bytes of stack of each thread, and the machine instructions of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        done = subprocess.run(
            [_BIN / "ptxas", "-v", "-arch=sm_90a", source, "-o", code], capture_output=True, text=True
        )
        listing = subprocess.run([_BIN / "cuobjdump", "-sass", code], capture_output=True, text=True).stdout
    stack = re.search(r"(\d+) bytes stack frame", done.stderr)
    assert stack is not None, done.stderr
    return int(stack[1]), re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", listing)


def stack(ptx: str) -> int:
    """Bytes that a thread spills."""
    return assembled(ptx)[0]


def instructions(ptx: str) -> int:
    return len(assembled(ptx)[1])


def exponentials_late(ptx: str) -> int:
    """How many exponentials follow the wait for all products, in all steps of all consumers."""
    return sum(late for _, late in _steps(ptx))


def arrival_late(ptx: str) -> int:
    """How many instructions lie between the wait for scores and the next arrival at a barrier, in all steps."""
    return sum(early for early, _ in _steps(ptx))


def _steps(ptx: str) -> list[tuple[int, int]]:
    """For each place where all products have ended after some exponentials: the numbers of the two functions above."""
    found, since, early, exponentials = [], 0, 0, 0
    waiting = False
    for line in [*assembled(ptx)[1], "HGMMA"]:
        since += 1
        if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in line and not waiting:
            since, waiting = 0, True
        elif "BAR.ARV" in line and waiting:
            early, waiting = since, False
        elif "HGMMA" in line and exponentials:
            found.append((early, exponentials))
            exponentials, waiting = 0, False
        elif "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line:
            exponentials = 0
        elif "MUFU.EX2" in line:
            exponentials += 1
    return found


FORWARD: Final = "ringattn_hopper_forward"
BACKWARD: Final = "ringattn_hopper_backward"
Row = tuple[str, Any, str, dict[str, Any], Callable[[str], int]]
ROWS: Final[dict[str, Row]] = {
    "softmax_first": ("forward_kernel", _nothing, FORWARD, {}, exponentials_late),
    "after_arrival": ("forward_kernel", _same, FORWARD, {"causal": False}, arrival_late),
    "hidden_unless_equal": (
        "forward_softmax",
        _selected,
        FORWARD,
        {"q_segments": IDS, "kv_segments": IDS},
        instructions,
    ),
    "opaque_zero": ("backward_products", _zero, BACKWARD, {}, stack),
    "readdress": ("backward_products", _place, BACKWARD, {}, stack),
}
"""For each workaround: the module that uses it, what stands for it, the kernel, options, the number."""


def text(kernel: str, fields: dict[str, Any]) -> str:
    """The PTX of a kernel, for heads of 128 in bfloat16."""
    given: dict[str, Any] = {"causal": True} | fields
    block = random_blocks.make_block(1, LENGTH, LENGTH, 16, dim=128, dtype=jnp.bfloat16, **given)
    rows = jax.ShapeDtypeStruct((1, 16, LENGTH), jnp.float32)
    of_call: dict[str, Any] = {
        FORWARD: (lambda block: KERNEL.forward(block, None), block),
        BACKWARD: (lambda block, dout, lse: KERNEL.backward(block, dout, lse, lse, None), block, block.q, rows),
    }
    found, original = {}, compiled.compile_kernel
    function, *arrays = of_call[kernel]

    def kept(call: Any, *rest: Any) -> Any:
        found[call.name] = original.__wrapped__(call, *rest)
        return found[call.name]

    compiled.compile_kernel = kept
    try:
        with compiling_for(90):
            jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    finally:
        compiled.compile_kernel = original
    return found[kernel].code


def main() -> None:
    knobs.compilation.always_compile = True
    may_go = []
    for name in sys.argv[1:] or ROWS:
        module, stand_in, kernel, fields, number = ROWS[name]
        user = importlib.import_module(f"ringattn_triton.hopper.{module}")
        having = number(text(kernel, fields))
        original = getattr(user, name)
        setattr(user, name, stand_in)
        jax.clear_caches()
        lacking = number(text(kernel, fields))
        setattr(user, name, original)
        jax.clear_caches()
        print(f"Triton {triton.__version__}, {name}: {number.__name__} {having} with, {lacking} without", flush=True)
        may_go += [name] if having == lacking and name != "readdress" else []
    sys.exit(bool(may_go))


if __name__ == "__main__":
    main()
