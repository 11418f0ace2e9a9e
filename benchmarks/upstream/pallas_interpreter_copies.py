# SPDX-License-Identifier: Apache-2.0
"""Whether Pallas's interpreter leaves whole arrays alone in each step of a grid.

With JAX 0.10.2, 0.11.2 and 0.12.0.1 it copies an input that it divides into blocks, and XLA on CPUs converts an output
in bfloat16 to float32 and back. `launch.py` of ringattn-tpu works round both. The exit status is 1 once one of the two
may go.
"""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

spec = pl.BlockSpec((8, 128), lambda step: (step, 0))
array = jnp.ones((256, 128))


def double(x: Any, out: Any) -> None:
    out[...] = (x[...] * 2).astype(out.dtype)


def whole_arrays(dtype: Any, operation: str) -> list[str]:
    """The operations of a step, in a program with an output of this dtype, that compute a whole array."""
    shape = jax.ShapeDtypeStruct(array.shape, dtype)
    call = pl.pallas_call(double, out_shape=shape, grid=(32,), in_specs=[spec], out_specs=spec, interpret=True)
    program = jax.jit(call).lower(array).compile().as_text() or ""
    (body,) = re.findall(r"while\(.*body=%?([\w.]+)", program)
    step = program[program.index(f"\n%{body} (") :].split("\n}")[0]
    return re.findall(rf"%?(\S*{operation}\S*) = \w+\[256,128\]", step)


copied = whole_arrays(jnp.float32, "copy")
converted = whole_arrays(jnp.bfloat16, "convert")
print(f"JAX {jax.__version__}: a step copies {copied}, converts {converted}")
sys.exit(not (copied and converted))
