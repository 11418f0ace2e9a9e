# SPDX-License-Identifier: Apache-2.0
"""Whether jax-triton lowers a kernel, and one with a NamedTuple of pointers, for sm_90 on this JAX; needs no GPU.

jax-triton 0.4.1 lowers the first on JAX 0.11.2 with Triton 3.9 and none on JAX 0.12.0.1, which its metadata allows.
The exit status is 1 once it lowers both on JAX 0.12: then `launch/compiled.py` of ringattn-triton has lost its reason.
"""

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import triton
import triton.language as tl


class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array


@triton.jit
def one(x, out):
    tl.store(out + tl.arange(0, 16), tl.load(x + tl.arange(0, 16)))


@triton.jit
def two(x, out):
    tl.store(out + tl.arange(0, 16), tl.load(x.a + tl.arange(0, 16)) + tl.load(x.b + tl.arange(0, 16)))


def lowers(kernel, x) -> bool:
    def call(x):
        options = {"grid": (1,), "compute_capability": 90}
        return jax_triton.triton_call(x, kernel=kernel, out_type=jax.ShapeDtypeStruct((16,), jnp.float32), **options)

    try:
        jax.jit(call).trace(x).lower(lowering_platforms=("cuda",))
    except Exception as error:
        print(f"{kernel.__name__}: {type(error).__name__}: {str(error)[:200]}")
        return False
    print(f"{kernel.__name__}: lowered")
    return True


x = jnp.ones(16)
print(f"JAX {jax.__version__}, Triton {triton.__version__}")
both = [lowers(one, x), lowers(two, Pair(x, x))]
sys.exit(all(both) and jax.__version__ >= "0.12")
