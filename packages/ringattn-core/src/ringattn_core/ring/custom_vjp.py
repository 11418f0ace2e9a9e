# SPDX-License-Identifier: Apache-2.0
"""Attention over the ring as one function with a derivative: the forward and the backward pass under one custom_vjp."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .backward import backward
from .blocks import Differentiable, Fixed, Ring
from .forward import Residuals, Result, forward
from .second_derivatives import first_derivative_only


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(ring: Ring, inputs: Differentiable, fixed: Fixed) -> Result:
    """`(out, lse)` of this rank's queries against the keys of all ranks."""
    return forward(ring, inputs, fixed)[0]


def _differentiated(ring: Ring, *given: Any) -> tuple[Result, tuple[jax.Array, Residuals]]:
    """The forward pass of inputs that JAX gives together with whether each one is differentiated.

    The backward pass must know whether the bias is. The first residual says so by its length, 1 for a bias that is
    not: JAX keeps one tree of residuals for each function that it
    has traced, whichever inputs are differentiated.
    """
    inputs, fixed = jax.tree.map(lambda x: x.value, given)
    bias_fixed = inputs.bias is not None and not given[0].bias.perturbed
    result, residuals = forward(ring, first_derivative_only(inputs), fixed)
    return result, (jnp.zeros(int(bias_fixed), jnp.int8), residuals)


def _cotangents(
    ring: Ring, residuals: tuple[jax.Array, Residuals], cotangents: tuple[Any, Any]
) -> tuple[Differentiable, None]:
    bias_fixed, kept = residuals
    return backward(ring, bias_fixed.size == 1, kept, *cotangents), None


attend.defvjp(_differentiated, _cotangents, symbolic_zeros=True)
