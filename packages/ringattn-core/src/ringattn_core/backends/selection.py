# SPDX-License-Identifier: Apache-2.0
"""Which backend runs a call, and why the others do not."""

import contextlib
import contextvars
import difflib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Final

from ..contract.backend import Backend
from ..contract.features import Feature
from ..errors import (
    AmbiguousBackendError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
    InputError,
    NoBackendError,
    RingAttnError,
    UnsupportedFeatureError,
)
from . import discovery
from .discovery import Registration

BACKEND_VARIABLE: Final = "RINGATTN_BACKEND"
VARIABLES: Final = (BACKEND_VARIABLE, "RINGATTN_AUTOTUNE", "RINGATTN_CACHE_DIR")
"""The environment variables that core reads; a backend declares its own."""

_logger: Final = logging.getLogger("ringattn")
_logged: set[str] = set()
_context: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("ringattn_backend", default=())
discovery.on_clear.append(_logged.clear)


def select(backend: str | Sequence[str] | None, required: frozenset[Feature], platform: str) -> Registration:
    """The backend for a call that needs `required` on devices of `platform`; its implementation loads.

    A name is final. A sequence is tried in order; a name in it that misspells another raises. `None` leaves it to
    `use_backend`, then to the environment, then to the priorities of the installed backends.
    """
    for sentence in unknown_variables():
        _log_once(logging.WARNING, sentence)
    if backend is not None:
        return _among(_names(backend, "backend"), required, platform)
    for source, names in (("use_backend", _context.get()), (BACKEND_VARIABLE, _of_environment())):
        if names:
            try:
                return _among(names, required, platform)
            except RingAttnError as error:
                error.add_note(f"The backend was named by {source}.")
                raise
    return _best(required, platform)


@contextlib.contextmanager
def use_backend(backend: str | Sequence[str]) -> Iterator[None]:
    """Names the backend, or an ordered fallback, for the calls in this context that name none themselves.

    It is read when a call is traced: a function that `jax.jit` has compiled before keeps its backend. A name that no
    call could use, or that misspells another in a sequence, raises here.
    """
    names, installed = _names(backend, "use_backend"), discovery.registrations()
    for name in names:
        unknown = None if name in installed else BackendNotFoundError(name, tuple(installed))
        if unknown is not None and (unknown.meant or len(names) == 1):
            raise unknown
    token = _context.set(names)
    try:
        yield
    finally:
        _context.reset(token)


def candidates(required: frozenset[Feature], platform: str) -> list[tuple[Registration, str | None]]:
    """Every registered backend, best first, with why it cannot run this call, or `None` where it can."""
    return [(registration, _why_not(registration, required, platform)) for registration in _ranked()]


def _among(names: tuple[str, ...], required: frozenset[Feature], platform: str) -> Registration:
    if len(names) == 1:
        return _exactly(names[0], required)
    reasons = {}
    installed = discovery.registrations()
    for name in names:
        if name in installed:
            reason = _why_not(installed[name], required, None)
        else:
            unknown = BackendNotFoundError(name, tuple(installed))
            if unknown.meant:
                raise unknown
            reason = str(unknown)
        if reason is None:
            return installed[name]
        reasons[name] = reason
        _log_once(logging.INFO if name in installed else logging.WARNING, f"backend {name!r} passed over: {reason}")
    raise NoBackendError(platform, reasons)


def _exactly(name: str, required: frozenset[Feature]) -> Registration:
    registration = discovery.get(name)
    reason = registration.why_unavailable()
    if reason is not None:
        raise BackendUnavailableError(name, reason)
    if _missing(registration.descriptor(), required):
        raise refusal(registration, required)
    registration.implementation()
    return registration


def refusal(registration: Registration, required: frozenset[Feature]) -> UnsupportedFeatureError:
    """Why a backend does not run a call that needs `required`, and which installed backends do."""
    name = registration.name
    others = [r.name for r in _ranked() if r.name != name and _why_not(r, required, None) is None]
    features, supports = zip(*_missing(registration.descriptor(), required), strict=True)
    return UnsupportedFeatureError(name, ", ".join(features), ", ".join(supports), others)


def _best(required: frozenset[Feature], platform: str) -> Registration:
    ranked = _ranked()
    if not ranked:
        raise BackendNotFoundError(None, ())
    reasons: dict[str, str] = {}
    usable: list[Registration] = []
    for registration in ranked:
        if usable and registration.backend is not None and _priority(registration) < _priority(usable[0]):
            continue
        reason = _why_not(registration, required, platform)
        if reason is None:
            usable.append(registration)
            continue
        reasons[registration.name] = reason
        level = logging.WARNING if serves(registration.backend, platform) else logging.INFO
        _log_once(level, f"backend {registration.name!r} passed over: {reason}")
    if not usable:
        raise NoBackendError(platform, reasons)
    if len(usable) > 1:
        raise AmbiguousBackendError(platform, usable[0].descriptor().priority, [r.name for r in usable])
    return usable[0]


def _why_not(registration: Registration, required: frozenset[Feature], platform: str | None) -> str | None:
    """The one place that says why a backend cannot run a call; `None` as platform stands for any."""
    backend = registration.backend
    if registration.error is not None or backend is None:
        return str(registration.error)
    if platform is not None and not serves(backend, platform):
        return f"it serves {', '.join(backend.platforms) or 'no platform'}, not {platform}"
    missing = _missing(backend, required)
    if missing:
        return "it does not support " + ", ".join(f"{feature} ({support})" for feature, support in missing)
    unavailable = registration.why_unavailable()
    if unavailable is not None:
        return f"it cannot run here: {unavailable}"
    try:
        registration.implementation()
    except BackendLoadError as error:
        return str(error)
    return None


def _missing(backend: Backend, required: frozenset[Feature]) -> list[tuple[str, str]]:
    lacking = [feature for feature in Feature if feature in required and not backend.supports(feature)]
    return [(feature.name, backend.answer(feature)) for feature in lacking]


def serves(backend: Backend | None, platform: str) -> bool:
    """Whether a backend is written for the platform; one that did not load might have been."""
    if backend is None:
        return True
    return _platform(platform) in {_platform(served) for served in backend.platforms}


def _platform(name: str) -> str:
    return "cuda" if name == "gpu" else name


def _priority(registration: Registration) -> float:
    return float("-inf") if registration.backend is None else registration.backend.priority


def _ranked() -> list[Registration]:
    return sorted(discovery.registrations().values(), key=lambda r: (-_priority(r), r.name))


def _names(backend: str | Sequence[str], argument: str) -> tuple[str, ...]:
    names = (backend,) if isinstance(backend, str) else backend
    if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) and n for n in names):
        raise InputError(argument, f"got {backend!r}", "Pass the name of a backend, or a sequence of names")
    return tuple(names)


def _of_environment() -> tuple[str, ...]:
    named = os.environ.get(BACKEND_VARIABLE, "").split(",")
    return tuple(name.strip() for name in named if name.strip())


def unknown_variables() -> Iterator[str]:
    """A sentence for each variable of the environment that looks like ours and is not."""
    declared = [r.backend.variables for r in discovery.registrations().values() if r.backend is not None]
    known = list(dict.fromkeys([*VARIABLES, *itertools.chain(*declared)]))
    for variable in os.environ:
        if variable.startswith("RINGATTN_") and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1)
            guess = f" (did you mean {close[0]}?)" if close else ""
            yield f"environment variable {variable} is not known{guess}. Known: {', '.join(known)}"


def _log_once(level: int, message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _logger.log(level, message)
