# SPDX-License-Identifier: Apache-2.0
"""Whether XLA for CPUs can sum bfloat16 over a manual mesh axis where another axis is automatic.

With JAX 0.10.2 the compiler aborts: "Invalid binary instruction opcode copy". `shared` in `placement/axes.py` of
ringattn-core works round it. The exit status is 1 once it may go.
"""

import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((2, 2), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
specs = {"in_specs": P("ring"), "out_specs": P(), "axis_names": {"ring"}}
total = jax.shard_map(lambda x: jax.lax.psum(x, "ring"), mesh=mesh, **specs)
print(jax.__version__, jax.jit(total)(jnp.ones(4, jnp.bfloat16)))
"""

ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
print(ended.stdout or "aborted")
sys.exit(ended.returncode == 0)
