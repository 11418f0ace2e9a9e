# SPDX-License-Identifier: Apache-2.0
"""Whether Pallas interprets a kernel in `shard_map(check_vma=True)`.

Compiled, a kernel knows nothing of the mesh. Interpreted, its operands vary over the axes of the mesh and its constants
do not, for which JAX 0.10.2, 0.11.2 and 0.12.0.1 raise. So tests of the kernels of ringattn-sparse pass
`check_vma=False`.
The exit status is 1 once that may go.
"""

import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P


def double(x: jax.Array) -> jax.Array:
    def kernel(x: jax.Ref, out: jax.Ref) -> None:
        out[...] = x[...] * 2

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
try:
    jax.block_until_ready(jax.jit(jax.shard_map(double, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(jnp.ones(8)))
    interpreted, why = True, ""
except Exception as error:
    interpreted, why = False, str(error).splitlines()[0][:200]
print(f"JAX {jax.__version__}: {'interpreted' if interpreted else why}")
sys.exit(interpreted)
