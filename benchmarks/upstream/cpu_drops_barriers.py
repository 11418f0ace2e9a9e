# SPDX-License-Identifier: Apache-2.0
"""Whether XLA on CPU keeps an optimization barrier until it schedules; else the barrier orders nothing.

With JAX 0.10.2, 0.11.2 and 0.12.0.1 it drops both the barrier and the computation that it waits for. `_by_bits` in
`contract/ordering.py` of ringattn-core works round it. The exit status is 1 once it may go.
"""

import sys

import jax
import jax.numpy as jnp

ordered = jax.jit(lambda x: jax.lax.optimization_barrier((x, jnp.sin(x)))[0] + 1)
kept = "sine" in ordered.lower(jnp.ones(4)).compile().as_text()
print(f"JAX {jax.__version__}: {'kept' if kept else 'dropped'}")
sys.exit(kept)
