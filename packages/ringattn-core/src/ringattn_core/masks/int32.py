# SPDX-License-Identifier: Apache-2.0
"""Refuses integers that do not fit: a cast would silently change a position, an id or a seed."""

from typing import Any

import jax
import jax.core
import numpy as np

from ..errors import InputError


def fitting(
    argument: str,
    given: Any,
    least: int = -(2**31),
    most: int = 2**31 - 1,
    remedy: str = "Pass values that fit int32",
) -> None:
    """Refuses an array of integers below `least` or above `most`; traced arrays, and those of other hosts, pass."""
    if isinstance(given, jax.core.Tracer) or given.dtype == bool:
        return
    if given.dtype != object:
        limits = np.iinfo(given.dtype)
        if least <= limits.min and limits.max <= most:
            return
    if isinstance(given, jax.Array) and not given.is_fully_addressable:
        return
    known = np.asarray(given)
    if known.size and (known.min() < least or known.max() > most):
        raise InputError(argument, f"reaches from {known.min()} to {known.max()}", remedy)
