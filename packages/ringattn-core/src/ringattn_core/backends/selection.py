# SPDX-License-Identifier: Apache-2.0
"""Which backend runs a call, and why the others do not."""

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
    from_clone,
)
from . import discovery
from .discovery import Registration

BACKEND_VARIABLE: Final = "RINGATTN_BACKEND"
VARIABLES: Final = (BACKEND_VARIABLE, "RINGATTN_AUTOTUNE", "RINGATTN_CACHE_DIR")
"""The environment variables that core reads. A backend declares its own in `Backend.variables`."""

_logger: Final = logging.getLogger("ringattn")
_log_once: Final = functools.cache(_logger.log)
_context: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("ringattn_backend", default=())
discovery.on_clear.append(_log_once.cache_clear)


Heads = tuple[int, int]
"""The sizes of the query heads and of the value heads of a call; 0 is a call of which nothing is known."""


def select(
    backend: str | Sequence[str] | None, required: frozenset[Feature], platform: str, heads: Heads = (0, 0)
) -> Registration:
    """The backend for a call that needs `required` on devices of `platform`, with its implementation imported.

    One name allows no fallback. A sequence is tried in order; an unknown name in it raises if it resembles a known
    one. `None` defers to `use_backend`, then to `RINGATTN_BACKEND`, then to the priorities of the installed backends;
    of two with the same priority, ringattn's own goes first, then the first by name.
    """
    for sentence in unknown_variables():
        _log_once(logging.WARNING, sentence)
    if backend is not None:
        return _among(_names(backend, "backend"), required, platform, heads)
    for source, names in (("use_backend", _context.get()), (BACKEND_VARIABLE, _of_environment())):
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

    It is read when a call is traced: a function that `jax.jit` compiled before keeps its backend. An unknown name
    raises here, in a sequence only if it resembles a known one.

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


def candidates(
    required: frozenset[Feature], platform: str, heads: Heads = (0, 0)
) -> list[tuple[Registration, str | None]]:
    """Every registered backend with the reason why it cannot run this call, or `None` if it can.

    Backends that failed to load come first. The others follow in the order in which a call tries them.
    """
    return [(registration, _why_not(registration, required, platform, heads)) for registration in _ranked()]


def _registered(names: tuple[str, ...]) -> list[Registration]:
    """The registration of each name. An unknown name raises if it is the only one, or resembles a known one."""
    installed = discovery.registrations()
    found = []
    for name in names:
        unknown = None if name in installed else BackendNotFoundError(name, tuple(installed))
        if unknown is not None and (unknown.meant or len(names) == 1):
            raise unknown
        found.append(installed[name] if unknown is None else Registration(name, None, "", "", unknown))
    return found


def _among(names: tuple[str, ...], required: frozenset[Feature], platform: str, heads: Heads) -> Registration:
    registrations = _registered(names)
    if len(registrations) == 1:
        return _exactly(registrations[0], required, heads)
    return _first(registrations, required, platform, heads, named=True)


def _exactly(registration: Registration, required: frozenset[Feature], heads: Heads) -> Registration:
    broken = registration.why_broken()
    if broken is not None:
        raise discovery.again(broken)
    descriptor, reason = registration.descriptor(), registration.why_unavailable()
    if reason is not None:
        raise BackendUnavailableError(registration.name, reason)
    if _missing(descriptor, required):
        raise refusal(registration, required)
    too_large = _too_large(descriptor, heads)
    if too_large is not None:
        name, others = registration.name, _others(registration, required, heads)
        takes = f"The backend {name!r} takes heads of up to {descriptor.largest_head}"
        other = f"pass backend=({name!r}, {others[0]!r})" if others else f"install {from_clone('ringattn-xla')}"
        raise InputError(*too_large, f"{takes}; to allow a fallback, {other}")
    registration.implementation()
    return registration


def refusal(registration: Registration, required: frozenset[Feature]) -> UnsupportedFeatureError:
    """The error for a backend that lacks a feature in `required`; it lists the backends that can run the call."""
    name = registration.name
    others = _others(registration, required, (0, 0))
    features, supports = zip(*_missing(registration.descriptor(), required), strict=True)
    installed = tuple(discovery.registrations())
    return UnsupportedFeatureError(name, ", ".join(features), ", ".join(supports), others, installed)


def _others(registration: Registration, required: frozenset[Feature], heads: Heads) -> list[str]:
    """The names of the other backends that can run the call."""
    return [r.name for r in _ranked() if r is not registration and _why_not(r, required, None, heads) is None]


def _first(
    registrations: list[Registration],
    required: frozenset[Feature],
    platform: str,
    heads: Heads,
    named: bool = False,
) -> Registration:
    """The first that can run the call, on any platform if it was `named`. Logs why those before it cannot."""
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
        return f"it serves {', '.join(backend.platforms) or 'no platform'}, not {platform}"
    missing = _missing(backend, required)
    if missing:
        return "it does not support " + ", ".join(f"{feature} ({support})" for feature, support in missing)
    too_large = _too_large(backend, heads)
    if too_large is not None:
        return f"it takes heads of up to {backend.largest_head}, and {' '.join(too_large)}"
    unavailable = registration.why_unavailable()
    if unavailable is not None and registration.why_broken() is None:
        return f"it cannot run here: {unavailable}"
    broken = registration.why_broken(load=True)
    return None if broken is None else str(broken)


def _too_large(backend: Backend, heads: Heads) -> tuple[str, str] | None:
    """An array whose heads are too large for the kernel, and the fact; `None` if there is none."""
    for name, size in zip(("query", "value"), heads, strict=True):
        if backend.largest_head is not None and size > backend.largest_head:
            return name, f"has heads of size {size}"
    return None


def _missing(backend: Backend, required: frozenset[Feature]) -> list[tuple[str, str]]:
    lacking = [feature for feature in Feature if feature in required and not backend.supports(feature)]
    return [(feature.name, backend.answer(feature)) for feature in lacking]


def serves(backend: Backend | None, platform: str) -> bool:
    """Whether a backend declares the platform. `None`, a backend that did not load, counts as declaring all."""
    if backend is None:
        return True
    return _platform(platform) in {_platform(served) for served in backend.platforms}


def _platform(name: str) -> str:
    return "cuda" if name == "gpu" else name


def _ranked() -> list[Registration]:
    """All backends, best first. Of two with the same priority, ringattn's own goes first, then the first by name.

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


def _of_environment() -> tuple[str, ...]:
    named = os.environ.get(BACKEND_VARIABLE, "").split(",")
    return tuple(name.strip() for name in named if name.strip())


def unknown_variables() -> Iterator[str]:
    """A sentence for each environment variable `RINGATTN_...` that neither core nor a backend declares."""
    declared = [r.backend.variables for r in discovery.registrations().values() if r.backend is not None]
    known = list(dict.fromkeys([*VARIABLES, *itertools.chain(*declared)]))
    for variable in os.environ:
        if variable.startswith("RINGATTN_") and variable not in known:
            guess = did_you_mean(variable, known)
            yield f"environment variable {variable} is not known{guess}. Known: {', '.join(known)}"
