# SPDX-License-Identifier: Apache-2.0
"""The names of the strategies. A strategy decides which rank has which keys when, and which heads a rank computes."""

from typing import Final, Literal, get_args

Strategy = Literal["ring", "all_gather", "ulysses", "auto"]
STRATEGIES: Final[tuple[str, ...]] = get_args(Strategy)
