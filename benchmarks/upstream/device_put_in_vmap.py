# SPDX-License-Identifier: Apache-2.0
"""Whether `vmap` of `device_put` places each example by the sharding, and not the whole batch by it.

JAX 0.10.2, 0.11.2 and 0.12.0.1 split the vmapped axis in place of the example's first axis. `_put` in
`placement/mesh.py` of ringattn-core works round it. The exit status is 1 once it may go.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
placed = jax.vmap(lambda x: jax.device_put(x, NamedSharding(mesh, P("a"))))(jnp.ones((2, 4)))
print(f"JAX {jax.__version__}: {placed.sharding}")
sys.exit(placed.sharding.spec == P(None, "a"))
