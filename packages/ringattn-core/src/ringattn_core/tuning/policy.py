# SPDX-License-Identifier: Apache-2.0
"""Whether a call without parameters of its own may use earlier tunings, and whether it may tune."""

import enum
import os
from typing import Final

import jax

from ..errors import InputError

VARIABLE: Final = "RINGATTN_AUTOTUNE"
CACHE_VARIABLE: Final = "RINGATTN_CACHE_DIR"


class Policy(enum.Enum):
    """The values of `RINGATTN_AUTOTUNE`; each allows more than the one before it."""

    OFF = "off"
    """The backend's default; reads no cache."""
    CACHED = "cached"
    """The result of an earlier tuning of this problem, else the backend's default."""
    ON = "on"
    """The result of an earlier tuning of this problem, else tunes now."""


def current() -> Policy:
    """The policy that the environment asks for, `CACHED` by default.

    Where several processes run one program, all must compile the same: no call tunes, and the cache is read only where
    the environment names its directory, which then is the same for all.
    """
    named = os.environ.get(VARIABLE, "").strip().lower() or Policy.CACHED.value
    try:
        policy = Policy(named)
    except ValueError:
        known = ", ".join(policy.value for policy in Policy)
        raise InputError(
            f"environment variable {VARIABLE}", f"got {named!r}", f"Set it to one of {known}, or unset it"
        ) from None
    if policy is not Policy.OFF and jax.process_count() > 1:
        return Policy.CACHED if os.environ.get(CACHE_VARIABLE) else Policy.OFF
    return policy
