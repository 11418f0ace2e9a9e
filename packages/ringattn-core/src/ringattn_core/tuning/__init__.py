# SPDX-License-Identifier: Apache-2.0
"""Which parameters a kernel runs with: those of the call, an overlay, an earlier tuning, a new one, or its default."""

from .choice import forget as forget
from .choice import tune as tune
from .overlay import overlay as overlay
from .problem import Problem as Problem
from .problem import Tunable as Tunable
