# SPDX-License-Identifier: Apache-2.0
"""The mesh and the random arrays of the adapters' tests, and whether two results agree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "sp"))


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def agree(got: Any, want: Any, atol: float = 5e-5) -> None:
    """Dtypes and shapes are equal, and values up to `atol` of the largest element, or of 1."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        scale = max(1.0, float(np.max(np.abs(np.float32(other)))))
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=0, atol=atol * scale)
