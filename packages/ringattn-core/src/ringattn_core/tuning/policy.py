# SPDX-License-Identifier: Apache-2.0
"""Whether a call without parameters may read tuned configurations, and whether it may tune."""

import os
from typing import Final

import jax

from ..errors import InputError

VARIABLE: Final = "RINGATTN_AUTOTUNE"
CACHE_VARIABLE: Final = "RINGATTN_CACHE_DIR"


POLICIES: Final = ("off", "cached", "on")
"""The values of `RINGATTN_AUTOTUNE`; each allows more than the one before it.

"off" is the backend's default, without reading the cache. "cached" is the result of an earlier tuning of this problem,
else the backend's default. "on" is the result of an earlier tuning, else tunes now.
"""


def current() -> str:
    """The policy that the environment asks for, "cached" by default.

    Where several processes run one program, all must compile the same program. No call tunes then, and the cache is
    read only if `RINGATTN_CACHE_DIR` is set, which must name the same directory for all.
    """
    policy = os.environ.get(VARIABLE, "").strip().lower() or "cached"
    if policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise InputError(
            f"environment variable {VARIABLE}", f"got {policy!r}", f"Set it to one of {known}, or unset it"
        )
    if policy != "off" and jax.process_count() > 1:
        return "cached" if os.environ.get(CACHE_VARIABLE) else "off"
    return policy
