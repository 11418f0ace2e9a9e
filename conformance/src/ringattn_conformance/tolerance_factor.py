# SPDX-License-Identifier: Apache-2.0
"""The settings that widen tolerances: a factor of the command line, and whether the backend has half partials."""

import math

_factor = 1.0
_half_partials = False


def use(factor: float) -> None:
    """Sets the factor for every later comparison of this process."""
    global _factor
    _factor = factor


def used() -> float:
    return _factor


def of_backend(half_partials: bool) -> None:
    """Says, for every later comparison of this process, whether the backend under test has `half_partials`."""
    global _half_partials
    _half_partials = half_partials


def half_partials() -> bool:
    return _half_partials


def parsed(text: str) -> float:
    """A factor from the command line: any positive number; raises ValueError otherwise."""
    factor = float(text)
    if not 0 < factor < math.inf:
        raise ValueError(text)
    return factor
