# SPDX-License-Identifier: Apache-2.0
"""Chooses kernel parameters: the call's own come first, then an overlay's, then tuned ones, then the defaults."""

import dataclasses
import importlib
import logging
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

from ..backends.discovery import Registration, on_clear
from ..config import RingAttentionConfig
from ..contract.call import Call
from ..errors import ToolsNotFoundError, TuningError
from ..placement.axes import size
from . import cache
from .overlay import OPEN, filled, overlays
from .policy import VARIABLE, current
from .problem import Problem, of_call, tunable

_logger: Final = logging.getLogger("ringattn")
_known: Final[dict[tuple[Registration, Problem], RingAttentionConfig | None]] = {}
"""What this process has tuned or read from the disk: the backend's default where tuning failed, `None` for a miss."""
_one_at_a_time: Final = threading.Lock()
_changes = 0
"""Counts replacements of tuned results. A program traced before one may run with old parameters."""


def state(backend: str) -> Hashable:
    """Everything except the call that decides its kernel parameters, where `backend` runs it.

    A program traced under a different value must be traced again.
    """
    return current(), overlays(backend), _changes


def forget() -> None:
    """Empties the cache in memory: the next call reads the disk again."""
    global _changes
    _known.clear()
    _changes += 1


on_clear.append(forget)


def with_parameters(registration: Registration, call: Call) -> Call:
    """Fills in the kernel parameters that the call of one shard does not set.

    Forward and backward parameters are chosen separately: a call may set one of them only.
    """
    forward, backward = call.fwd_params, call.bwd_params
    for cfg in overlays(registration.name):
        forward, backward = filled(forward, backward, cfg)
    if forward == OPEN.fwd_params or backward == OPEN.bwd_params:
        kernel = registration.implementation()
        if tunable(registration) or hasattr(kernel, "default_config"):
            problem = of_call(registration, call, size("axis_name", call.axis_name or ()))
            forward, backward = filled(forward, backward, configured(registration, problem))
    if forward is call.fwd_params and backward is call.bwd_params:
        return call
    return dataclasses.replace(call, fwd_params=forward, bwd_params=backward)


def configured(registration: Registration, problem: Problem) -> RingAttentionConfig:
    """The tuned configuration from memory or disk; else tunes if the policy is "on"; else the backend's default."""
    global _changes
    policy = current()
    if policy == "off":
        return default(registration, problem)
    missed_before = _key(registration, problem) in _known
    found = _stored(registration, problem)
    if found is None and policy == "on" and tunable(registration):
        found = _tuned_now(registration, problem)
        _changes += missed_before  # with the policy "cached", programs were traced with the default
    return default(registration, problem) if found is None else found


def default(registration: Registration, problem: Problem) -> RingAttentionConfig:
    """The backend's `default_config` for the problem; if it has no such function, a configuration that sets nothing."""
    own = getattr(registration.implementation(), "default_config", None)
    return OPEN if own is None else own(problem)


def store(
    registration: Registration, problem: Problem, config: RingAttentionConfig, trials: Sequence[Mapping[str, Any]]
) -> None:
    """Makes `config` the tuned configuration of the problem, in memory and on the disk.

    Programs that were traced before are traced again. Results of a backend that is registered in this process are not
    stored on the disk, because it has no version. `trials` are the times of all candidates.
    """
    global _changes
    _keep(registration, problem, config, trials)
    _changes += 1


def _keep(
    registration: Registration, problem: Problem, config: RingAttentionConfig, trials: Sequence[Mapping[str, Any]]
) -> None:
    _known[_key(registration, problem)] = config
    if not registration.in_process:
        cache.write(problem, config, trials)


def _stored(registration: Registration, problem: Problem) -> RingAttentionConfig | None:
    """The configuration from memory or disk. Each problem is looked up on the disk once."""
    key = _key(registration, problem)
    if key not in _known:
        entry = None if registration.in_process else cache.read(problem)
        # Another thread may have tuned the problem meanwhile.
        _known.setdefault(key, None if entry is None else entry.config)
    return _known[key]


def _tuned_now(registration: Registration, problem: Problem) -> RingAttentionConfig | None:
    """Tunes, unless another thread did so meanwhile. The lock keeps two tunings from disturbing each other's times."""
    key = _key(registration, problem)
    with _one_at_a_time:
        if _known.get(key) is None:
            usual = default(registration, problem)
            try:
                outcome = _search().fastest(registration, problem, usual)
                _keep(registration, problem, outcome.config, [timed.to_dict() for timed in outcome.trials])
            except TuningError as error:
                _known[key] = usual
                _logger.warning("%s. Its default is used", error)
        return _known[key]


def _search() -> Any:
    """The module of `ringattn-tools` that times candidates. Core knows that distribution by its name only."""
    try:
        return importlib.import_module("ringattn_tools.search")
    except ModuleNotFoundError as error:
        if error.name != "ringattn_tools":
            raise
        raise ToolsNotFoundError(f"{VARIABLE}=on") from None


def _key(registration: Registration, problem: Problem) -> tuple[Registration, Problem]:
    """The key of `_known`: without the call, whose masks may hold large arrays."""
    return registration, dataclasses.replace(problem, call=None)
