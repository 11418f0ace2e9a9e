# SPDX-License-Identifier: Apache-2.0
"""Which tuned configurations calls use: `RINGATTN_AUTOTUNE` says whether files are read, and whether calls tune."""

import logging
import os
import threading
from typing import Final

import jax
from ringattn_core.backends.discovery import Registration
from ringattn_core.config import RingAttentionConfig
from ringattn_core.errors import InputError, TuningError
from ringattn_core.tuning import choice
from ringattn_core.tuning.problem import Problem, tunable

from . import tuned_files

POLICIES: Final = ("off", "cached", "on")
_logger: Final = logging.getLogger("ringattn")
_one_at_a_time: Final = threading.Lock()


def policy() -> str:
    """What `RINGATTN_AUTOTUNE` says: "off", "cached" (the default) or "on". Each allows more than the one before it.

    "off" uses the backend's default and reads no file. "cached" uses the result of an earlier tuning of this problem,
    else the backend's default. "on" uses the result of an earlier tuning, else tunes now.

    If several processes run one program, all must compile the same program. So "on" then means "cached", and files are
    read only if `RINGATTN_CACHE_DIR` is set; it must name the same directory for all processes.
    """
    said = os.environ.get(choice.AUTOTUNE, "").strip().lower() or "cached"
    if said not in POLICIES:
        remedy = f"Set it to one of {', '.join(POLICIES)}, or unset it"
        raise InputError(f"environment variable {choice.AUTOTUNE}", f"got {said!r}", remedy)
    if said != "off" and jax.process_count() > 1:
        return "cached" if os.environ.get(tuned_files.VARIABLE) else "off"
    return said


def configured(registration: Registration, problem: Problem) -> RingAttentionConfig:
    """The tuned configuration from memory or a file; else tunes if the policy is "on"; else the backend's default."""
    said = policy()
    if said == "off":
        return choice.default(registration, problem)
    if (found := choice.known(registration, problem)) is not None:
        return found
    if (
        not (choice.traced(registration, problem) or registration.in_process)
        and (entry := tuned_files.read(problem)) is not None
    ):
        return choice.remembered(registration, problem, entry.config)
    if said == "on" and tunable(registration):
        with _one_at_a_time:  # two tunings would disturb each other's times
            if choice.known(registration, problem) is None:
                _tune(registration, problem)
    return choice.remembered(registration, problem, None)


def _tune(registration: Registration, problem: Problem) -> None:
    """Tunes. If that fails, stores the default as its result."""
    from . import search  # only here: it imports what draws its progress

    try:
        search.tune(problem, registration)
    except TuningError as error:
        choice.store(registration, problem, choice.default(registration, problem))
        _logger.warning("%s. Its default is used", error)
