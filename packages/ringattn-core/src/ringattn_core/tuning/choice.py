# SPDX-License-Identifier: Apache-2.0
"""Chooses kernel parameters: the call's own come first, then an overlay's, then tuned ones, then the defaults."""

import contextlib
import contextvars
import dataclasses
import logging
import os
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from ..backends.discovery import Registration, on_clear, tool
from ..config import BwdParams, FwdParams, RingAttentionConfig
from ..contract.call import Call
from ..errors import InputError, TuningError
from ..placement.axes import size
from . import cache
from .problem import Problem, of_call, tunable

VARIABLE: Final = "RINGATTN_AUTOTUNE"
POLICIES: Final = ("off", "cached", "on")
_logger: Final = logging.getLogger("ringattn")
_overlays: contextvars.ContextVar[tuple[RingAttentionConfig, ...]] = contextvars.ContextVar("overlays", default=())
_known: Final[dict[tuple[Registration, Problem], RingAttentionConfig | None]] = {}
"""The configuration of each problem that was tuned, here or on disk; the backend's default if its tuning failed.

`None`: the problem is not tuned, and calls of it were traced with the default. No entry: no call of it was traced.
"""
_one_at_a_time: Final = threading.Lock()
_changes = 0
"""Counts changes of parameters that calls were traced with. A program from before a change may have other ones."""


def policy() -> str:
    """What `RINGATTN_AUTOTUNE` says: "off", "cached" (the default) or "on". Each allows more than the one before it.

    "off" uses the backend's default and does not read the cache. "cached" uses the result of an earlier tuning of this
    problem, else the backend's default. "on" uses the result of an earlier tuning, else tunes now.

    If several processes run one program, all must compile the same program. So "on" then means "cached", and the
    cache is read only if `RINGATTN_CACHE_DIR` is set; it must name the same directory for all processes.
    """
    said = os.environ.get(VARIABLE, "").strip().lower() or "cached"
    if said not in POLICIES:
        remedy = f"Set it to one of {', '.join(POLICIES)}, or unset it"
        raise InputError(f"environment variable {VARIABLE}", f"got {said!r}", remedy)
    if said != "off" and jax.process_count() > 1:
        return "cached" if os.environ.get(cache.VARIABLE) else "off"
    return said


@contextlib.contextmanager
def overlay(cfg: RingAttentionConfig | Mapping[str, Any]) -> Iterator[None]:
    """Gives the forward or backward parameters of `cfg` to calls inside the `with` block that set none themselves.

    Of nested overlays, the innermost that sets these parameters wins. An overlay that names a backend applies to calls
    of that backend only.
    Overlays are read when a call is traced: a function that `jax.jit` has already compiled does not change.
    """
    token = _overlays.set((RingAttentionConfig.of(cfg, "overlay"), *_overlays.get()))
    try:
        yield
    finally:
        _overlays.reset(token)


def _overlays_of(backend: str) -> tuple[RingAttentionConfig, ...]:
    """The overlays of this context that apply to calls of `backend`, the innermost first."""
    return tuple(cfg for cfg in _overlays.get() if cfg.backend_name in (None, backend))


def state(backend: str) -> Hashable:
    """A key of everything outside a call that decides the kernel parameters with which `backend` runs the call.

    If the key changes, a traced program must be traced again.
    """
    return policy(), _overlays_of(backend), _changes


def forget() -> None:
    """Empties the cache in memory: the next call reads the disk again."""
    global _changes
    _known.clear()
    _changes += 1


on_clear.append(forget)


def with_parameters(registration: Registration, call: Call) -> Call:
    """Fills in the kernel parameters that a rank's call, with the arrays of its shard, does not set.

    Forward and backward parameters are filled in separately, because a call may set only one kind.
    """
    cfgs = _overlays_of(registration.name)
    forward = [x for x in (call.rule.fwd_params, *(cfg.fwd_params for cfg in cfgs)) if x != FwdParams()]
    backward = [x for x in (call.rule.bwd_params, *(cfg.bwd_params for cfg in cfgs)) if x != BwdParams()]
    if not (forward and backward):
        tuned = RingAttentionConfig()
        if tunable(registration) or hasattr(registration.implementation(), "default_config"):
            tuned = configured(registration, of_call(registration, call, size(call.placement.axis_name or ())))
        forward, backward = [*forward, tuned.fwd_params], [*backward, tuned.bwd_params]
    return call.ruled(fwd_params=forward[0], bwd_params=backward[0])


def configured(registration: Registration, problem: Problem) -> RingAttentionConfig:
    """The tuned configuration from memory or disk; else tunes if the policy is "on"; else the backend's default."""
    said, key = policy(), _key(registration, problem)
    if said == "off":
        return default(registration, problem)
    if key not in _known and not registration.in_process and (entry := cache.read(problem)) is not None:
        _known.setdefault(key, entry.config)  # unless another thread has set it meanwhile
    if _known.get(key) is None and said == "on" and tunable(registration):
        with _one_at_a_time:  # two tunings would disturb each other's times
            if _known.get(key) is None:
                _tune(registration, problem)
    return _known.setdefault(key, None) or default(registration, problem)


def _tune(registration: Registration, problem: Problem) -> None:
    """Tunes with the package `ringattn-tools`, imported by name. If tuning fails, stores the default as its result."""
    search = tool("search", f"{VARIABLE}=on")
    try:
        search.tune(problem, registration)
    except TuningError as error:
        _known[_key(registration, problem)] = default(registration, problem)
        _logger.warning("%s. Its default is used", error)


def default(registration: Registration, problem: Problem) -> RingAttentionConfig:
    """The backend's `default_config` for the problem; if it has no such function, a configuration that sets nothing."""
    own = getattr(registration.implementation(), "default_config", None)
    return RingAttentionConfig() if own is None else own(problem)


def store(
    registration: Registration, problem: Problem, config: RingAttentionConfig, trials: Sequence[Mapping[str, Any]]
) -> None:
    """Makes `config` the tuned configuration of the problem, in memory and on the disk.

    If a call of the problem was traced with another configuration, every call is traced again. Nothing is stored on
    disk for a backend that was registered in this process, because it has no version. `trials` are the times of all
    candidates.
    """
    global _changes
    key = _key(registration, problem)
    before = _known.setdefault(key, config)
    _known[key] = config
    _changes += before != config
    if not registration.in_process:
        cache.write(problem, config, trials)


def _key(registration: Registration, problem: Problem) -> tuple[Registration, Problem]:
    """The key of `_known`: the problem without its `call`, whose masks may hold large arrays."""
    return registration, dataclasses.replace(problem, call=None)
