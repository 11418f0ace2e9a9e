# SPDX-License-Identifier: Apache-2.0
"""Choosing keys on a ring: `select` finds the blocks of keys that an indexer scores highest, `teach` trains it."""

from .selection import select
from .teaching import teach

__all__ = ["select", "teach"]
