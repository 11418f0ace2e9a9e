# SPDX-License-Identifier: Apache-2.0
"""Which kernel parameters (tile sizes) a call uses: its own, an overlay's, tuned ones, or the backend's default."""

from .choice import forget as forget
from .choice import overlay as overlay
from .problem import Problem as Problem
from .problem import Tunable as Tunable
