# SPDX-License-Identifier: Apache-2.0
"""Whether a call whose parameters nobody gives may use what was tuned, or tune now."""

import enum
import os
from typing import Final

import jax

from ..errors import InputError

VARIABLE: Final = "RINGATTN_AUTOTUNE"
CACHE_VARIABLE: Final = "RINGATTN_CACHE_DIR"


class Policy(enum.Enum):
    """Each value allows what the one before it allows, and more."""

    OFF = "off"
    """The backend's default; no cache is read."""
    CACHED = "cached"
    """What was tuned for this problem before, else the backend's default."""
    ON = "on"
    """What was tuned for this problem before, else it is tuned now."""


def current() -> Policy:
    """What the environment says, `CACHED` where it says nothing.

    Of several processes that run one program no call tunes, because all must compile the same; and none reads a cache,
    unless the environment names the directory, which is then for all of them.
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
