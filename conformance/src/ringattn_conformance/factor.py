# SPDX-License-Identifier: Apache-2.0
"""By what factor this run multiplies the tolerances of the specification: 1, unless its user says so aloud."""

import math

_factor = 1.0


def use(factor: float) -> None:
    """Every comparison of this process from now on."""
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
