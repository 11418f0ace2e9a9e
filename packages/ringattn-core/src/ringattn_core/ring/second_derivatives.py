# SPDX-License-Identifier: Apache-2.0
"""What is differentiated once, and not again: the backward pass has no rule, and says so."""

from typing import Any

import jax

from ..errors import DerivativeError


@jax.custom_jvp
def once(x: Any) -> Any:
    """`x`, of which nobody can take a derivative."""
    return x


@once.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise DerivativeError(
        "the gradient of ring_attention was differentiated once more, and there is no rule for that. Take first "
        "derivatives in reverse mode (grad, vjp), of jax.lax.stop_gradient(inputs) where the gradient is part of a loss"
    )
