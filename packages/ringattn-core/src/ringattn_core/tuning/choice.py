# SPDX-License-Identifier: Apache-2.0
"""Chooses kernel parameters: the call's own come first, then an overlay's, then tuned ones, then the defaults."""

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final

from ..backends.discovery import Registration, on_clear, tool
from ..config import BwdParams, FwdParams, RingAttentionConfig
from ..contract.call import Call
from ..errors import ToolsNotFoundError
from ..placement.axes import size
from .problem import Problem, of_call, tunable

AUTOTUNE: Final = "RINGATTN_AUTOTUNE"
_VARIABLES: Final = (AUTOTUNE, "RINGATTN_CACHE_DIR")
"""The environment variables that decide whether tuned configurations are used (`ringattn_tools.policy`)."""
_overlays: contextvars.ContextVar[tuple[RingAttentionConfig, ...]] = contextvars.ContextVar("overlays", default=())
_known: Final[dict[tuple[Registration, Problem], RingAttentionConfig | None]] = {}
"""The configuration of each problem that was tuned; the backend's default if its tuning failed.

`None`: the problem is not tuned, and calls of it were traced with the default. No entry: no call of it was traced.
"""
_changes = 0
"""Counts changes of parameters that calls were traced with. A program from before a change may have other ones."""


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
    return tuple(map(os.environ.get, _VARIABLES)), _overlays_of(backend), _changes


def forget() -> None:
    """Forgets what was tuned in this process or read from files."""
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
            tuned = configured(registration, of_call(registration, call, size(call.placement.roles.sequence)))
        forward, backward = [*forward, tuned.fwd_params], [*backward, tuned.bwd_params]
    return call.ruled(fwd_params=forward[0], bwd_params=backward[0])


def configured(registration: Registration, problem: Problem) -> RingAttentionConfig:
    """What `ringattn-tools` chooses; without that package, a configuration stored in this process, else the default."""
    said = os.environ.get(AUTOTUNE, "").strip().lower()
    try:
        policy = tool("policy", f"{AUTOTUNE}={said}")
    except ToolsNotFoundError:
        if said not in ("", "off", "cached"):
            raise
        return remembered(registration, problem, None)
    return policy.configured(registration, problem)


def traced(registration: Registration, problem: Problem) -> bool:
    """Whether a call of the problem was traced, or a configuration stored for it."""
    return _key(registration, problem) in _known


def known(registration: Registration, problem: Problem) -> RingAttentionConfig | None:
    """The configuration that is stored for the problem in this process, if any."""
    return _known.get(_key(registration, problem))


def remembered(registration: Registration, problem: Problem, config: RingAttentionConfig | None) -> RingAttentionConfig:
    """Keeps `config`, unless another is stored for the problem already; returns what is stored, else the default.

    `None` says that the problem is not tuned: its calls are traced with the default.
    """
    return _known.setdefault(_key(registration, problem), config) or default(registration, problem)


def default(registration: Registration, problem: Problem) -> RingAttentionConfig:
    """The backend's `default_config` for the problem; if it has no such function, a configuration that sets nothing."""
    own = getattr(registration.implementation(), "default_config", None)
    return RingAttentionConfig() if own is None else own(problem)


def store(registration: Registration, problem: Problem, config: RingAttentionConfig) -> None:
    """Makes `config` the configuration of the problem in this process.

    If a call of the problem was traced with another configuration, every call is traced again.
    """
    global _changes
    key = _key(registration, problem)
    before = _known.setdefault(key, config)
    _known[key] = config
    _changes += before != config


def _key(registration: Registration, problem: Problem) -> tuple[Registration, Problem]:
    """The key of `_known`: the problem without its `call`, whose masks may hold large arrays."""
    return registration, dataclasses.replace(problem, call=None)
