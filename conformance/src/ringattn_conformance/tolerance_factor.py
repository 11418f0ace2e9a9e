# SPDX-License-Identifier: Apache-2.0
"""The factor by which this run multiplies every tolerance: 1 unless the command line sets it."""

import math

_factor = 1.0


def use(factor: float) -> None:
    """Sets the factor for every later comparison of this process."""
    global _factor
    _factor = factor


def used() -> float:
    return _factor


def parsed(text: str) -> float:
    """A factor from the command line: any positive number; raises ValueError otherwise."""
    factor = float(text)
    if not 0 < factor < math.inf:
        raise ValueError(text)
    return factor
