# SPDX-License-Identifier: Apache-2.0
"""Checks of integers: one number that shapes the program, or an array that must fit int32.

A cast would silently change a position, an id or a seed.
"""

import numbers
import operator
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .errors import InputError

Limits = tuple[int, int, str]
"""The least and the largest allowed value, and the remedy that the error for any other value names."""
INT32: Final[Limits] = (-(2**31), 2**31 - 1, "Pass values that fit int32")
POSITION: Final[Limits] = (1 - 2**30, 2**30 - 1, "Pass positions below 2^30: then the difference of two fits int32")
SEED: Final[Limits] = (-(2**31), 2**32 - 1, "Pass an integer of 32 bits")


def fitting(argument: str, given: Any, limits: Limits = INT32) -> None:
    """Raises if an array of integers exceeds the limits. Does not check arrays that are traced or on other hosts."""
    least, most, remedy = limits
    if isinstance(given, jax.core.Tracer):
        return
    if given.dtype != object and least <= np.iinfo(given.dtype).min and np.iinfo(given.dtype).max <= most:
        return
    if isinstance(given, jax.Array) and not given.is_fully_addressable:
        return
    known = np.asarray(given)
    if known.size and (known.min() < least or known.max() > most):
        least, most = known.min(), known.max()
        values = f"has values from {least} to {most}" if least < most else f"has the value {least}"
        raise InputError(argument, values, remedy)


def as_int32(argument: str, x: Any, limits: Limits = INT32) -> jax.Array:
    """`x` as an array of int32; refuses other numbers, and integers beyond the limits."""
    return jnp.asarray(integers(argument, x, limits)).astype(jnp.int32)


def integers(argument: str, x: Any, limits: Limits) -> Any:
    """`x` as an array of integers, of NumPy unless JAX has it; refuses other numbers, and those beyond the limits."""
    given = as_given(argument, x)
    huge = given.dtype == object and all(isinstance(value, int) for value in np.ravel(given))  # beyond int64
    if not huge and not jnp.issubdtype(given.dtype, jnp.integer):
        raise InputError(argument, f"has dtype {given.dtype}", "It needs integers")
    fitting(argument, given, limits)
    return given


def as_given(argument: str, x: Any) -> Any:
    """`x` as an array, of NumPy unless JAX has it. (`jnp.asarray` would silently cut 64-bit integers to 32 bits.)"""
    if isinstance(x, jax.Array | np.ndarray):
        return x
    try:
        return np.asarray(x)
    except jax.errors.TracerArrayConversionError:
        return jnp.asarray(x)
    except ValueError as error:
        raise InputError(
            argument, f"is not an array: {error}", "Pass an array, or nested lists of equal lengths"
        ) from None


def whole(argument: str, x: Any, least: int, most: float = 2**31 - 1, remedy: str | None = None) -> int:
    """`x` as a Python integer; raises unless it is an integer from `least` to `most` that is known before tracing."""
    if isinstance(x, jax.core.Tracer):
        raise InputError(argument, "is traced", "It shapes the program: pass an integer, or mark it static in jax.jit")
    known = isinstance(x, numbers.Integral) or (hasattr(x, "dtype") and hasattr(x, "__index__") and not np.ndim(x))
    if isinstance(x, bool) or not known or not least <= (value := operator.index(x)) <= most:
        raise InputError(argument, f"got {x!r}", remedy or f"It needs an integer of at least {least}")
    return value
