# SPDX-License-Identifier: Apache-2.0
"""Choosing keys on a ring: `select` returns the blocks of keys that an indexer scores highest."""

from .selection import select

__all__ = ["select"]
