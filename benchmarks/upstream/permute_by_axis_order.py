# SPDX-License-Identifier: Apache-2.0
"""Whether `ppermute` over several axes counts ranks in the order of the names it is given, as `axis_index` does.

JAX 0.10.2 counts in the order of the mesh; 0.11.2 and 0.12.0.1 refuse names in another order. `permuted` in
`placement/axes.py` of ringattn-core works round it. The exit status is 1 once it may go.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
split = P(("b", "a"))


def onward(x):
    return jax.lax.ppermute(x, ("b", "a"), [(rank, (rank + 1) % 4) for rank in range(4)])


try:
    found = jax.shard_map(onward, mesh=mesh, in_specs=split, out_specs=split)(jnp.arange(4)).tolist()
except RuntimeError as error:
    found = f"{type(error).__name__}: {error}"
print(f"JAX {jax.__version__}: {found}")
sys.exit(found == [3, 0, 1, 2])
