# SPDX-License-Identifier: Apache-2.0
"""With which parameters a backend runs a call: given, overlaid, tuned before, tuned now, or its own default."""

from .choice import forget as forget
from .choice import tune as tune
from .overlay import overlay as overlay
from .problem import Problem as Problem
from .problem import Tunable as Tunable
