# SPDX-License-Identifier: Apache-2.0
"""Whether XLA on CPU sends bfloat16 as bfloat16, and not as float32, which is twice as long.

With JAX 0.10.2, 0.11.2 and 0.12.0.1 it sends float32. `_permuted` in `ring/exchange.py` of ringattn-core works round
it. The exit status is 1 once it may go.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
send = jax.shard_map(lambda x: jax.lax.ppermute(x, "a", [(0, 1), (1, 0)]), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
program = jax.jit(send).lower(jnp.ones(4, jnp.bfloat16)).compile().as_text() or ""
(line,) = [line.strip() for line in program.splitlines() if "= " in line and " collective-permute" in line]
print(f"JAX {jax.__version__}: {line}")
sys.exit("bf16" in line.split("=")[1][:8])
