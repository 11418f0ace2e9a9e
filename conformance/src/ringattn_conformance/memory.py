# SPDX-License-Identifier: Apache-2.0
"""How large a process of tests may become: a machine of 4 GB has to hold one."""

import ctypes
import gc
import os
from pathlib import Path

import jax

_limit = 1.2e9
"""It rises to 1.3 times what is left, so that a process that stays large does not drop its programs at each test."""


def size() -> int:
    """The bytes that this process has in memory; 0 where the system does not tell."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.is_file() else 0


def drop_programs() -> None:
    """Drops JAX's compiled programs if this process has become large. What is needed again is compiled again."""
    global _limit
    if size() > _limit:
        jax.clear_caches()
        gc.collect()
        # Without this glibc keeps most of what is now free.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        _limit = max(_limit, 1.3 * size())
