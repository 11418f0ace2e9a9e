# SPDX-License-Identifier: Apache-2.0
"""Makes JAX trace calls of attention anew, where a test has changed how they are traced."""

from ringattn_core.call import sharding
from ringattn_core.ring import engine
from ringattn_core.strategies import cache


def forget_traced_calls() -> None:
    """`jax.clear_caches` would do as well, but then every later test compiles its small operations again."""
    for traced in (engine._attend, cache._attend, sharding._run):
        traced.clear_cache()
