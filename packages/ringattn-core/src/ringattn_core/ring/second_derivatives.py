# SPDX-License-Identifier: Apache-2.0
"""Raises on second derivatives: the backward pass has no derivative rule of its own."""

from typing import Any

import jax

from ..errors import DerivativeError


@jax.custom_jvp
def first_derivative_only(x: Any) -> Any:
    """`x`; differentiating it raises."""
    return x


@first_derivative_only.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise DerivativeError(
        "the gradient of ring_attention was differentiated once more, and there is no rule for that. Take first "
        "derivatives in reverse mode (grad, vjp), of jax.lax.stop_gradient(inputs) where the gradient is part of a loss"
    )
