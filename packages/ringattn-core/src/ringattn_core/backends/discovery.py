# SPDX-License-Identifier: Apache-2.0
"""Which backends are installed, and what is wrong with the broken ones."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..contract.backend import API_VERSIONS, Backend
from ..contract.protocol import BlockKernel
from ..contract.signature import mismatch
from ..errors import (
    BackendLoadError,
    BackendNotFoundError,
    BackendVersionError,
    DuplicateBackendError,
    InputError,
    RingAttnError,
)

GROUP: Final = "ringattn.backends"


@dataclasses.dataclass(frozen=True, eq=False)
class Registration:
    """One name under which a backend is registered: its descriptor, or the error that takes its place."""

    name: str
    backend: Backend | None
    distribution: str
    version: str
    error: RingAttnError | None = None
    given: Any = None
    """The kernel or ring function itself, where it was registered in this process."""

    @property
    def in_process(self) -> bool:
        """Whether `registered` added it in this process. It then belongs to no distribution and has no version."""
        return self.distribution == _HERE

    def descriptor(self) -> Backend:
        """The backend's descriptor; raises `error` if the backend is broken."""
        if self.error is not None:
            raise _again(self.error)
        assert self.backend is not None
        return self.backend

    def implementation(self) -> Any:
        """The block kernel, or the ring function, that the descriptor names; imported once, on first use."""
        if self not in _implementations:
            try:
                _implementations[self] = self._implementation()
            except BackendLoadError as error:
                _implementations[self] = error
        loaded = _implementations[self]
        if isinstance(loaded, BackendLoadError):
            raise _again(loaded)
        return loaded

    def why_unavailable(self) -> str | None:
        """Why the backend cannot run in this process, as one sentence, or `None`. The probe runs once."""
        if self not in _availability:
            _availability[self] = self._probe()
        return _availability[self]

    def _implementation(self) -> Any:
        backend = self.descriptor()
        path = backend.kernel or backend.ring
        assert path is not None
        loaded = self.given if self.given is not None else self._load(path)
        if isinstance(loaded, type):
            raise BackendLoadError(self.name, self.distribution, path, "it is a class, not an instance of one")
        if backend.kernel is not None:
            if getattr(loaded, "__hash__", None) is None:
                reason = f"a block kernel must be hashable, which {loaded!r} is not: JAX compiles once for each"
                raise BackendLoadError(self.name, self.distribution, path, reason)
            missing = [name for name in _METHODS if not callable(getattr(loaded, name, None))]
            if missing or not isinstance(loaded, BlockKernel):
                reason = f"a block kernel needs {' and '.join(missing)}, which {loaded!r} lacks"
                raise BackendLoadError(self.name, self.distribution, path, reason)
            return loaded
        reason = mismatch(loaded) if callable(loaded) else f"a ring function must be callable, got {loaded!r}"
        if reason is not None:
            raise BackendLoadError(self.name, self.distribution, path, reason)
        return loaded

    def _probe(self) -> str | None:
        if self.error is not None:
            return str(self.error)
        probe = self.descriptor().probe
        if probe is None:
            return None
        try:
            reason = self._load(probe)()
        except Exception as error:
            return f"its probe {probe} failed: {type(error).__name__}: {error}"
        return None if reason is None else str(reason)

    def _load(self, path: str) -> Any:
        module, _, attribute = path.partition(":")
        try:
            return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        except Exception as error:
            raise BackendLoadError(self.name, self.distribution, path, error) from error


_METHODS: Final = ("forward", "backward")
_implementations: dict[Registration, Any] = {}
_availability: dict[Registration, str | None] = {}
_in_process: dict[str, Registration] = {}
on_clear: Final[list[Callable[[], None]]] = [_implementations.clear, _availability.clear]
"""What `clear` calls. A module that caches something about backends adds a function that empties its cache."""


def registrations() -> dict[str, Registration]:
    """Every registered backend by name; a broken one has an `error`. Entry points are read at the first call."""
    found = {**_installed(), **_in_process}
    return {name: found[name] for name in sorted(found)}


def get(name: str) -> Registration:
    """The registration of that name; raises if the backend is broken or not registered."""
    found = registrations()
    if name not in found:
        raise BackendNotFoundError(name, tuple(found))
    found[name].descriptor()
    return found[name]


def clear() -> None:
    """Empties all caches: the next call reads entry points, imports kernels and runs probes again."""
    _installed.cache_clear()
    for forget in on_clear:
        forget()


@contextlib.contextmanager
def registered(backend: Backend, implementation: Any = None) -> Iterator[Registration]:
    """Registers a backend in this process for a `with` block. It shadows an installed backend of the same name.

    Without `implementation`, the kernel is imported from the path in the descriptor.
    """
    if not isinstance(backend, Backend):
        raise InputError("backend", f"got {backend!r}", "Pass a ringattn_core.Backend")
    reason = _defect(backend, backend.name, _HERE)
    registration = Registration(backend.name, backend, _HERE, "0", reason, implementation)
    previous = _in_process.get(backend.name)
    _in_process[backend.name] = registration
    try:
        yield registration
    finally:
        if previous is None:
            _in_process.pop(backend.name, None)
        else:
            _in_process[backend.name] = previous
        _implementations.pop(registration, None)
        _availability.pop(registration, None)


_HERE: Final = "this process"


@functools.cache
def _installed() -> dict[str, Registration]:
    by_name: dict[str, list[Any]] = {}
    # Not `importlib_metadata`: it replaces the finder of the whole process, and its first look loads support for zip
    # files: 11 ms for the 2 that discovery takes without it (`benchmarks/import_time.py`).
    for entry in importlib.metadata.entry_points(group=GROUP):
        by_name.setdefault(entry.name, []).append(entry)
    return {name: _registration(name, entries) for name, entries in by_name.items()}


def _registration(name: str, entries: list[Any]) -> Registration:
    owners = [entry.dist.name if entry.dist else "an unknown distribution" for entry in entries]
    version = str(entries[0].dist.version) if entries[0].dist else "unknown"
    if len(entries) > 1:
        error = DuplicateBackendError(name, owners)
        return Registration(name, None, ", ".join(owners), version, error)
    owner = owners[0]
    try:
        backend = entries[0].load()
    except Exception as cause:
        error = BackendLoadError(name, owner, f"its entry point {entries[0].value}", cause)
        error.__cause__ = cause
        return Registration(name, None, owner, version, error)
    error = _defect(backend, name, owner)
    return Registration(name, None if error else backend, owner, version, error)


def _defect(backend: Any, name: str, owner: str) -> RingAttnError | None:
    if not isinstance(backend, Backend):
        return BackendLoadError(name, owner, "its descriptor", f"expected a ringattn_core.Backend, got {backend!r}")
    if type(backend.api) is not int or backend.api not in API_VERSIONS:
        return BackendVersionError(name, owner, backend.api, API_VERSIONS)
    if backend.name != name:
        return BackendLoadError(name, owner, "its descriptor", f"its name is {backend.name!r}")
    if isinstance(backend.platforms, str):
        reason = f"platforms={backend.platforms!r} must be a tuple of names"
        return BackendLoadError(name, owner, "its descriptor", reason)
    return None


def _again(error: RingAttnError) -> RingAttnError:
    """A copy of a cached error, to raise: the cached one would collect the tracebacks and notes of all its callers."""
    fresh = type(error).__new__(type(error), *error.args)
    fresh.__dict__.update(error.__dict__)
    fresh.__cause__ = error.__cause__
    return fresh
