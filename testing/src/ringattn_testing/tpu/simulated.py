# SPDX-License-Identifier: Apache-2.0
"""What the simulator of a TPU makes of a case: numbers, and whether two accesses of memory raced.

A program of its own: the simulator needs more threads than cores, and XLA counts them when it starts.
"""

import json
import os
import subprocess
import sys
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from ringattn_core.contract.protocol import Partial
from ringattn_tpu.block import KERNEL
from ringattn_tpu.launch import At, Grid, Operand, Step, launch
from ringattn_tpu.steps import steps
from ringattn_xla.block import KERNEL as REFERENCE

from ringattn_testing.random_blocks import random_ids
from ringattn_testing.random_blocks import random_mask as dense_mask
from ringattn_testing.tpu.blocks import make_block, ranges

CASES: Final[dict[str, dict[str, Any]]] = {
    "nothing visible": {"causal": True, "offset": 512},
    "sinks and nothing visible": {"causal": True, "offset": 512, "sinks": True},
    "documents that differ by row": {"batch": 2, "documents": True, "kv_heads": 1},
    "slopes, in two passes": {"causal": True, "slopes": True},
    "bias that all share": {"batch": 2, "bias": (1, 1, 1)},
    "bits of heads and dropout": {"mask": True, "dropout_prob": 0.2},
    "ranges of heads": {"kv_range": True},
    "sinks, bits and dropout": {"mask": True, "dropout_prob": 0.2, "sinks": True},
}
FAULTS: Final = ("none", "a copy is read before it is there", "two heads write one place")


def simulated(kind: str, *names: str) -> dict[str, Any]:
    """What `_case` or `_fault` says of each, in a process of one device whose kernels are simulated."""
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)
    variables = {"JAX_PLATFORMS": "cpu", "RINGATTN_TPU_INTERPRET": "simulate", "NPROC": "16", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-m", __name__, kind, *names],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"the simulator failed: {done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _raced() -> bool:
    """Whether the simulator has found a race in the launch before; only JAX's own tests have a public way to ask."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert interpret_pallas_call.races is not None, "no kernel ran in the simulator"
    return interpret_pallas_call.races.races_found


def _case(name: str) -> dict[str, Any]:
    """Whether any launch raced, and how far each result is from that of the backend `xla`, over its largest element."""
    options: dict[str, Any] = dict(CASES[name])
    length, heads = 256, 2
    batch, sinks = options.pop("batch", 1), options.pop("sinks", False)
    if options.pop("documents", False):
        options["q_segments"] = options["kv_segments"] = random_ids(batch, length)
    if options.pop("slopes", False):
        options["slopes"] = np.float32([[0.5, 0.1]])
    if "bias" in options:
        options["bias"] = np.random.default_rng(5).normal(size=(*options["bias"], length)).astype(np.float32)
    if options.pop("kv_range", False):
        options["kv_range"] = ranges(batch, heads, length, length)
    if options.pop("mask", False):
        options |= {"mask": dense_mask(1, heads, length, length), "seed": np.uint32([3])}
    options["kv_positions"] = np.arange(length, dtype=np.int32)[None] + options.pop("offset", 0)
    params = {"q_blocksize": 128, "kv_blocksize": 128, "extra": {"part": 128}}
    block = make_block(batch, length, length, heads, dim=16, params=params, **options)
    draw = np.random.default_rng(1)
    out, dq, dout = (jnp.asarray(draw.normal(size=block.q.shape), jnp.float32) for _ in range(3))
    lse, delta = (jnp.asarray(draw.normal(size=(batch, heads, length)), jnp.float32) for _ in range(2))
    before = Partial(None if sinks else out, lse)
    final = jax.jit(REFERENCE.forward)(block, before)
    raced = False

    def results(kernel: Any) -> dict[str, Any]:
        nonlocal raced
        partial = jax.block_until_ready(kernel.forward(block, before))
        raced |= kernel is KERNEL and _raced()
        gradients = jax.block_until_ready(kernel.backward(block, dout, final.lse, delta, dq))
        raced |= kernel is KERNEL and _raced()
        names = ("dq", "dk", "dv", "dbias", "dslopes")
        return {"out": partial.out, "lse": partial.lse} | {name: getattr(gradients, name) for name in names}

    got, want = results(KERNEL), results(REFERENCE)
    wrong = {
        name: float(np.abs(np.asarray(got[name] - x)).max() / max(0.1, np.abs(np.asarray(x)).max()))
        for name, x in want.items()
        if x is not None
    }
    return {"raced": raced, "wrong": wrong}


def _fault(name: str) -> bool:
    """Whether the simulator says that a kernel raced which doubles each head's tile, and does wrong what is named."""
    x = jnp.ones((1, 2, 128, 128), jnp.float32)
    block = make_block(1, 128, 128)
    early, together = (name == fault for fault in FAULTS[1:])

    def kernel(step: Step, inputs: Any, outputs: Any, scratch: Any) -> None:
        copy = pltpu.make_async_copy(inputs["x"], scratch["copy"], scratch["arrived"])
        copy.start()
        if early:
            outputs["y"][...] = 2 * scratch["copy"][...]
        copy.wait()
        if not early:
            outputs["y"][...] = 2 * scratch["copy"][...]

    def of_head(at: At) -> tuple[Any, ...]:
        return at.batch, at.head, 0, 0

    tile = (None, None, 128, 128)
    shape = jax.ShapeDtypeStruct((1, 1 if together else 2, 128, 128), jnp.float32)
    found = launch(
        kernel,
        steps(block, 128, 128),
        Grid(1, 2),
        {"x": Operand(x, tile, of_head)},
        {"y": Operand(shape, tile, (lambda at: (0, 0, 0, 0)) if together else of_head)},
        scratch={"copy": pltpu.VMEM((128, 128), jnp.float32), "arrived": pltpu.SemaphoreType.DMA},
        name="doubled",
    )
    jax.block_until_ready(found)
    return _raced()


if __name__ == "__main__":
    run = {"case": _case, "fault": _fault}[sys.argv[1]]
    print(json.dumps({name: run(name) for name in sys.argv[2:]}))
