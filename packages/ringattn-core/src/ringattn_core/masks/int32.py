# SPDX-License-Identifier: Apache-2.0
"""Refuses integers outside int32: a cast would silently change a position, an id or a seed."""

from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..errors import InputError

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
    given = as_given(argument, x)
    huge = given.dtype == object and all(isinstance(value, int) for value in np.ravel(given))  # beyond int64
    if not huge and not jnp.issubdtype(given.dtype, jnp.integer):
        raise InputError(argument, f"has dtype {given.dtype}", "It needs integers")
    fitting(argument, given, limits)
    return jnp.asarray(given).astype(jnp.int32)


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


def size(argument: str, x: Any, least: int = 0) -> int:
    """`x` as a Python integer; raises unless it is an integer of `least` or more."""
    if isinstance(x, bool) or not hasattr(x, "__index__") or isinstance(x, jax.core.Tracer) or np.ndim(x) or x < least:
        raise InputError(argument, f"got {x!r}", f"It needs an integer of {least} or more")
    return int(x)
