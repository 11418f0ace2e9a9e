# SPDX-License-Identifier: Apache-2.0
"""Which integers fit int32, as which everything counts: one that is cut becomes another position, or padding."""

from typing import Any

import jax
import jax.core
import numpy as np

from ..errors import InputError


def fitting(argument: str, given: Any) -> None:
    """Refuses an array with integers that do not; those that are traced, or on another host, nobody can look at."""
    if isinstance(given, jax.core.Tracer) or np.can_cast(given.dtype, np.int32):
        return
    if isinstance(given, jax.Array) and not given.is_fully_addressable:
        return
    known, limits = np.asarray(given), np.iinfo(np.int32)
    if known.size and (known.min() < limits.min or known.max() > limits.max):
        raise InputError(argument, f"reaches from {known.min()} to {known.max()}", "Pass values that fit int32")
