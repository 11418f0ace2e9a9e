# SPDX-License-Identifier: Apache-2.0
"""Attention over the ring as one function with a derivative: the forward and the backward pass under one custom_vjp."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .backward import backward
from .blocks import Differentiable, Fixed, Ring
from .forward import Result, forward
from .second_derivatives import once


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(ring: Ring, inputs: Differentiable, fixed: Fixed) -> Result:
    """`(out, lse)` of this rank's queries against the keys of all ranks."""
    return forward(ring, inputs, fixed, kept=False)[0]


def _differentiated(ring: Ring, *given: Any) -> tuple[Result, tuple[Any, ...]]:
    """The forward pass of inputs that JAX gives together with whether each one is differentiated.

    The backward pass must know whether the bias is. The first residual says so by its length, 1 for a bias that is
    not: for a function that JAX has traced once, it remembers one tree of residuals, whatever it differentiates.
    """
    inputs, fixed = jax.tree.map(lambda x: x.value, given)
    bias_fixed = inputs.bias is not None and not given[0].bias.perturbed
    result, residuals = forward(ring, once(inputs), fixed)
    return result, (jnp.zeros(int(bias_fixed), jnp.int8), *residuals)


def _cotangents(ring: Ring, residuals: tuple[Any, ...], cotangents: tuple[Any, Any]) -> tuple[Differentiable, None]:
    bias_fixed, inputs, fixed, out, rest, keys_lse, own = residuals
    return backward(ring, bias_fixed.size == 1, inputs, fixed, out, rest, keys_lse, own, *cotangents), None


attend.defvjp(_differentiated, _cotangents, symbolic_zeros=True)
