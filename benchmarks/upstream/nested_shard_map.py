# SPDX-License-Identifier: Apache-2.0
"""Whether JAX can differentiate a `shard_map` inside another one that has `check_vma=True`.

JAX 0.10.2, 0.11.2 and 0.12.0.1 cannot: residuals would be split over the outer axes twice. `call/tracked.py` and
`over_shards` in `placement/mesh.py` of ringattn-core work round it. The exit status is 1 once they may go.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((2, 2), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2)


def inside(x):
    return jax.shard_map(jnp.sin, in_specs=P("inner"), out_specs=P("inner"), axis_names={"inner"})(x)


outside = jax.shard_map(inside, mesh=mesh, in_specs=P("outer"), out_specs=P("outer"), axis_names={"outer"})
try:
    jax.jit(jax.grad(lambda x: outside(x).sum()))(jnp.ones(8))
except Exception as error:
    print(f"JAX {jax.__version__}: {type(error).__name__}: {str(error)[:160]}")
    sys.exit(0)
print(f"JAX {jax.__version__}: differentiated")
sys.exit(1)
