# SPDX-License-Identifier: Apache-2.0
"""Selects the backend that runs a call, and says why other backends cannot."""

import contextlib
import contextvars
import functools
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Final

from ..contract.backend import Backend
from ..contract.features import Feature
from ..errors import (
    OWN,
    BackendNotFoundError,
    BackendUnavailableError,
    InputError,
    NoBackendError,
    RingAttnError,
    UnsupportedFeatureError,
    did_you_mean,
)
from . import discovery
from .discovery import Registration

BACKEND_VARIABLE: Final = "RINGATTN_BACKEND"
VARIABLES: Final = (BACKEND_VARIABLE, "RINGATTN_AUTOTUNE", "RINGATTN_CACHE_DIR", "RINGATTN_CHECK")
"""The environment variables that core reads. A backend declares its own in `Backend.variables`."""

Heads = tuple[int, ...]
"""The sizes of a call's query heads and of its value heads; empty if they do not matter."""

_logger: Final = logging.getLogger("ringattn")
_log_once: Final = functools.cache(_logger.log)
_context: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("ringattn_backend", default=())
discovery.on_clear.append(_log_once.cache_clear)


def select(
    backend: str | Sequence[str] | None, required: frozenset[Feature], platform: str, heads: Heads = ()
) -> Registration:
    """The backend for a call that needs `required` on devices of `platform`, with its implementation imported.

    One name allows no fallback. A sequence of names is tried in order; an unknown name in it raises if it resembles a
    known name, and else is passed over.
    `None` defers to `use_backend`, then to `RINGATTN_BACKEND`, then to the priorities of the installed backends; of
    equal priorities, ringattn's own backends go first, then the first by name.
    """
    for sentence in unknown_variables():
        _log_once(logging.WARNING, sentence)
    if backend is not None:
        return _among(_names(backend, "backend"), required, platform, heads)
    variable = tuple(filter(None, map(str.strip, os.environ.get(BACKEND_VARIABLE, "").split(","))))
    for source, names in (("use_backend", _context.get()), (BACKEND_VARIABLE, variable)):
        if names:
            try:
                return _among(names, required, platform, heads)
            except RingAttnError as error:
                error.add_note(f"The backend was named by {source}.")
                raise
    ranked = _ranked()
    if not ranked:
        raise BackendNotFoundError(None, ())
    return _first(ranked, required, platform, heads)


@contextlib.contextmanager
def use_backend(backend: str | Sequence[str]) -> Iterator[None]:
    """Names the backend, or an ordered fallback, for the calls in this context that name none themselves.

    The name is read when a call is traced: a function that `jax.jit` compiled before keeps its backend. An unknown
    single name raises here; an unknown name in a sequence raises only if it resembles a known name.

    Args:
        backend: The name of a backend, or several names to try in order.
    """
    names = _names(backend, "use_backend")
    _registered(names)
    token = _context.set(names)
    try:
        yield
    finally:
        _context.reset(token)


def candidates(required: frozenset[Feature], platform: str, heads: Heads = ()) -> list[tuple[Registration, str | None]]:
    """Every registered backend with the reason why it cannot run this call, or `None` if it can.

    Backends that failed to load come first. The others follow in the order in which a call tries them.
    """
    return [(registration, _why_not(registration, required, platform, heads)) for registration in _ranked()]


def _registered(names: tuple[str, ...]) -> list[Registration]:
    """The registration of each name. An unknown name raises if it is the only name, or resembles a known name."""
    installed = discovery.registrations()
    found = []
    for name in names:
        unknown = None if name in installed else BackendNotFoundError(name, tuple(installed))
        if unknown is not None and (unknown.meant or len(names) == 1):
            raise unknown
        found.append(installed[name] if unknown is None else Registration(name, None, "", "", unknown))
    return found


def _among(names: tuple[str, ...], required: frozenset[Feature], platform: str, heads: Heads) -> Registration:
    """The only named backend, or the first of several named backends that can run the call; raises if none can."""
    registrations = _registered(names)
    if len(registrations) > 1:
        return _first(registrations, required, platform, heads, named=True)
    (registration,) = registrations
    reason = registration.why_unavailable()
    if reason is not None:
        raise BackendUnavailableError(registration.name, reason)
    if _missing(registration.descriptor(), required, heads):
        raise refusal(registration, required, heads)
    registration.implementation()
    return registration


def refusal(registration: Registration, required: frozenset[Feature], heads: Heads = ()) -> UnsupportedFeatureError:
    """The error for a backend that lacks something that a call needs; lists other backends that can run the call."""
    what, why = map(", ".join, zip(*_missing(registration.descriptor(), required, heads), strict=True))
    able = [r.name for r in _ranked() if r is not registration and _why_not(r, required, None, heads) is None]
    return UnsupportedFeatureError(registration.name, what, why, able, tuple(discovery.registrations()))


def _first(
    registrations: list[Registration],
    required: frozenset[Feature],
    platform: str,
    heads: Heads,
    named: bool = False,
) -> Registration:
    """The first registration that can run the call, on any platform if `named`; logs why earlier ones cannot."""
    reasons = {}
    for registration in registrations:
        reason = _why_not(registration, required, None if named else platform, heads)
        if reason is None:
            return registration
        reasons[registration.name] = reason
        meant = registration.backend is None or (serves(registration.backend, platform) and not named)
        _log_once(logging.WARNING if meant else logging.INFO, f"backend {registration.name!r} passed over: {reason}")
    raise NoBackendError(platform, reasons, tuple(discovery.registrations()))


def _why_not(
    registration: Registration, required: frozenset[Feature], platform: str | None, heads: Heads
) -> str | None:
    """Why a backend cannot run a call, or `None` where it can. `platform=None` accepts every platform."""
    backend = registration.backend
    if registration.error is not None or backend is None:
        return str(registration.error)
    if platform is not None and not serves(backend, platform):
        return f"it serves {', '.join(backend.platforms)}, not {platform}"
    missing = _missing(backend, required, heads)
    if missing:
        return "it does not support " + ", ".join(f"{what} ({why})" for what, why in missing)
    try:
        reason = registration.why_unavailable()
        if reason is None:
            registration.implementation()
    except RingAttnError as error:
        return str(error)
    return None if reason is None else f"it cannot run here: {reason}"


def _missing(backend: Backend, required: frozenset[Feature], heads: Heads) -> list[tuple[str, str]]:
    """What a call needs and the backend lacks: each feature or head size, with the reason."""
    missing = [(x.name, backend.answer(x)) for x in Feature if x in required and not backend.supports(x)]
    misfits = [(size, backend.misfit(size)) for size in dict.fromkeys(heads)]
    return missing + [(f"heads of size {size}", why) for size, why in misfits if why is not None]


def serves(backend: Backend | None, platform: str) -> bool:
    """Whether a backend declares the platform. `None` (its descriptor did not load) counts as every platform."""
    names = {platform, *({"gpu", "cuda"} if platform in ("gpu", "cuda") else ())}
    return backend is None or not names.isdisjoint(backend.platforms)


def _ranked() -> list[Registration]:
    """All backends, best first: by priority, then ringattn's own before others, then by name.

    Broken backends come first: they never run a call, but each call then logs them before it finds another.
    """

    def order(registration: Registration) -> tuple[bool, int, bool, str]:
        name, backend = registration.name, registration.backend
        is_own = name in OWN and registration.distribution == f"ringattn-{name}"
        return backend is not None, 0 if backend is None else -backend.priority, not is_own, name

    return sorted(discovery.registrations().values(), key=order)


def _names(backend: str | Sequence[str], argument: str) -> tuple[str, ...]:
    names = (backend,) if isinstance(backend, str) else backend
    if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) and n for n in names):
        raise InputError(argument, f"got {backend!r}", "Pass the name of a backend, or a sequence of names")
    return tuple(names)


def unknown_variables() -> Iterator[str]:
    """A sentence for each environment variable `RINGATTN_...` that neither core nor a backend declares."""
    declared = [r.backend.variables for r in discovery.registrations().values() if r.backend is not None]
    known = list(dict.fromkeys([*VARIABLES, *itertools.chain(*declared)]))
    for variable in os.environ:
        if variable.startswith("RINGATTN_") and variable not in known:
            guess = did_you_mean(variable, known)
            yield f"environment variable {variable} is not known{guess}. Known: {', '.join(known)}"
