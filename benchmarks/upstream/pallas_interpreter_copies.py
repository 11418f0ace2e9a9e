# SPDX-License-Identifier: Apache-2.0
"""Whether Pallas's interpreter leaves whole arrays alone in each step of a grid.

With JAX 0.10.2, 0.11.2 and 0.12.0.1 it copies an input that it divides into blocks, and XLA on CPUs converts an output
in bfloat16 to float32 and back. `launch.py` of ringattn-tpu works round both. The exit status is 1 once it may go.
"""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def double(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


spec = pl.BlockSpec((8, 128), lambda step: (step, 0))
array = jnp.ones((256, 128), jnp.bfloat16)
call = pl.pallas_call(double, out_shape=array, grid=(32,), in_specs=[spec], out_specs=spec, interpret=True)
program = jax.jit(call).lower(array).compile().as_text() or ""
(body,) = re.findall(r"while\(.*body=%?([\w.]+)", program)
lines = program[program.index(f"{body} (") :].split("\n}")[0].splitlines()
whole = [line.strip()[:100] for line in lines if re.search(r"= \w+\[256,128\]\S* (copy|fusion|convert)\(", line)]
print(f"JAX {jax.__version__}: a step computes {len(whole)} whole arrays", *whole, sep="\n")
sys.exit(not whole)
