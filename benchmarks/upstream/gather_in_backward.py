# SPDX-License-Identifier: Apache-2.0
"""Whether a backward rule under `vmap(axis_name=)` can gather over that axis; a sum over it works.

On JAX 0.10.2, 0.11.2 and 0.12.0.1 the name is unbound there. `all_gathered` and `scattered_sum` in `placement/axes.py`
of ringattn-core work round it. The exit status is 1 once they may go.
"""

import sys

import jax
import jax.numpy as jnp

same = jax.custom_vjp(lambda x: x)
same.defvjp(lambda x: (x, None), lambda _, dx: (jax.lax.all_gather(dx, "i").sum(0),))
try:
    jax.grad(lambda x: jax.vmap(same, axis_name="i")(x).sum())(jnp.ones(4))
except NameError as error:
    print(f"JAX {jax.__version__}: NameError: {error}")
    sys.exit(0)
print(f"JAX {jax.__version__}: gathered")
sys.exit(1)
