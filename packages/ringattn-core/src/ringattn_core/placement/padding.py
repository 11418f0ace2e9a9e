# SPDX-License-Identifier: Apache-2.0
"""What padding holds when a kernel reads it: zeros, whatever the caller left there."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def cleaned(x: Shaped[Array, "B T *rest"], ids: Int32[Array, "B T"] | None) -> Shaped[Array, "B T *rest"]:
    """`x` with zeros where the id of a token is negative; without ids no token is padding.

    A product mixes tokens that see each other with tokens that do not, and `0 * NaN` is NaN. With zeros in the padding
    no kernel needs to know what padding holds. XLA fuses this selection with whatever computed `x`.
    """
    if ids is None:
        return x
    real = jax.lax.expand_dims(ids >= 0, range(2, x.ndim))
    return jnp.where(real, x, jnp.zeros((), x.dtype))
