# SPDX-License-Identifier: Apache-2.0
"""Whether JAX pads an axis that an explicit mesh axis splits to a length that the mesh axis does not divide.

JAX 0.10.2, 0.11.2 and 0.12.0.1 do not. `prepared` in `call/sharding.py` of ringattn-core gathers such an axis first.
The exit status is 1 once it need not.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
x = jax.device_put(jnp.ones(4), NamedSharding(mesh, P("a")))
try:
    jnp.pad(x, (0, 1))
except Exception as error:
    print(f"JAX {jax.__version__}: {type(error).__name__}: {str(error)[:160]}")
    sys.exit(0)
print(f"JAX {jax.__version__}: padded")
sys.exit(1)
