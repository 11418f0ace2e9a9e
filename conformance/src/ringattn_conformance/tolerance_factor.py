# SPDX-License-Identifier: Apache-2.0
"""The settings that widen the tolerances of later comparisons of this process."""

import math

factor = 1.0
"""By what every tolerance is multiplied: an option of the command line."""
half_partials = False
"""Whether the backend under test declares `half_partials`."""


def parsed(text: str) -> float:
    """A factor from the command line: any positive number; raises ValueError otherwise."""
    found = float(text)
    if not 0 < found < math.inf:
        raise ValueError(text)
    return found
