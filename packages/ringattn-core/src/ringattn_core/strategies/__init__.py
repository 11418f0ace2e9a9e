# SPDX-License-Identifier: Apache-2.0
"""The strategies: which of the ranks holds which keys when, and which heads it computes."""

from typing import Final, Literal, get_args

Strategy = Literal["ring", "all_gather", "ulysses", "auto"]
STRATEGIES: Final[tuple[str, ...]] = get_args(Strategy)
