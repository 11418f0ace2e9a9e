# SPDX-License-Identifier: Apache-2.0
"""Whether a call without parameters may read tuned configurations, and whether it may tune."""

import os
from typing import Final, Literal, get_args

import jax

from ..errors import InputError

VARIABLE: Final = "RINGATTN_AUTOTUNE"
CACHE_VARIABLE: Final = "RINGATTN_CACHE_DIR"

Policy = Literal["off", "cached", "on"]
"""The values of `RINGATTN_AUTOTUNE`; each allows more than the one before it.

"off" is the backend's default, without reading the cache. "cached" is the result of an earlier tuning of this problem,
else the backend's default. "on" is the result of an earlier tuning, else tunes now.
"""


def current() -> Policy:
    """The policy that the environment asks for, "cached" by default.

    Where several processes run one program, all must compile the same program. No call tunes then, and the cache is
    read only if `RINGATTN_CACHE_DIR` is set, which must name the same directory for all.
    """
    asked = os.environ.get(VARIABLE, "").strip().lower() or "cached"
    policy = next((each for each in get_args(Policy) if each == asked), None)
    if policy is None:
        known = ", ".join(get_args(Policy))
        raise InputError(f"environment variable {VARIABLE}", f"got {asked!r}", f"Set it to one of {known}, or unset it")
    if policy != "off" and jax.process_count() > 1:
        return "cached" if os.environ.get(CACHE_VARIABLE) else "off"
    return policy
