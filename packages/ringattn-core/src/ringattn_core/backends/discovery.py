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
        if isinstance(self._loaded, BackendLoadError):
            raise _again(self._loaded)
        return self._loaded

    def why_unavailable(self) -> str | None:
        """Why the backend cannot run in this process, as one sentence, or `None`. The probe runs once."""
        return self._answer_of_probe

    @functools.cached_property
    def _loaded(self) -> Any:
        """The implementation, or the error that takes its place."""
        backend = self.descriptor()
        path = backend.kernel or backend.ring
        assert path is not None
        try:
            loaded = self._load(path) if self.given is None else self.given
        except BackendLoadError as error:
            return error
        reason = _defect_of_kernel(loaded) if backend.kernel else _defect_of_ring(loaded)
        return loaded if reason is None else BackendLoadError(self.name, self.distribution, path, reason)

    @functools.cached_property
    def _answer_of_probe(self) -> str | None:
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


def _defect_of_kernel(kernel: Any) -> str | None:
    if isinstance(kernel, type):
        return "it is a class, not an instance of one"
    if getattr(kernel, "__hash__", None) is None:
        return f"a block kernel must be hashable, which {kernel!r} is not: JAX compiles once for each"
    missing = [name for name in ("forward", "backward") if not callable(getattr(kernel, name, None))]
    return f"a block kernel needs {' and '.join(missing)}, which {kernel!r} lacks" if missing else None


def _defect_of_ring(ring: Any) -> str | None:
    return mismatch(ring) if callable(ring) else f"a ring function must be callable, got {ring!r}"


_in_process: dict[str, Registration] = {}
on_clear: Final[list[Callable[[], None]]] = []
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
    before = dict(_in_process)
    _in_process[backend.name] = registration
    try:
        yield registration
    finally:
        _in_process.clear()
        _in_process.update(before)


_HERE: Final = "this process"


@functools.cache
def _installed() -> dict[str, Registration]:
    by_name: dict[str, list[Any]] = {}
    # Not `importlib_metadata`: importing it replaces the finder of the whole process, and its first lookup imports
    # support for zip files. Discovery takes 11 ms with it and 2 ms without (`benchmarks/import_time.py`).
    for entry in importlib.metadata.entry_points(group=GROUP):
        by_name.setdefault(entry.name, []).append(entry)
    return {name: _registration(name, entries) for name, entries in by_name.items()}


def _registration(name: str, entries: list[Any]) -> Registration:
    owners = [entry.dist.name if entry.dist else "an unknown distribution" for entry in entries]
    version = str(entries[0].dist.version) if entries[0].dist else "unknown"
    owner = ", ".join(owners)
    backend = None
    if len(entries) > 1:
        error: RingAttnError | None = DuplicateBackendError(name, owners)
    else:
        try:
            backend = entries[0].load()
            error = _defect(backend, name, owner)
        except Exception as cause:
            error = BackendLoadError(name, owner, f"its entry point {entries[0].value}", cause)
            error.__cause__ = cause
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
