# SPDX-License-Identifier: Apache-2.0
"""Puts zeros into the padding of a cotangent, whatever the caller left there."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def cleaned(x: Shaped[Array, "B T *rest"], ids: Int32[Array, "B T"] | None) -> Shaped[Array, "B T *rest"]:
    """`x` with zeros where the id of a token is negative; `x` itself without ids, for then no token is padding.

    A masked token still enters matrix products with weight 0, and `0 * NaN` is NaN. With zeros in the padding no kernel
    needs code for this.
    """
    if ids is None:
        return x
    real = jax.lax.expand_dims(ids >= 0, range(2, x.ndim))
    return jnp.where(real, x, jnp.zeros((), x.dtype))
