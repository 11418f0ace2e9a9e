# SPDX-License-Identifier: Apache-2.0
"""Finds the installed backends, and what is wrong with each broken one."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..contract.backend import API_VERSIONS, Backend
from ..contract.features import Feature
from ..contract.signature import mismatch
from ..errors import (
    BackendLoadError,
    BackendNotFoundError,
    BackendVersionError,
    DuplicateBackendError,
    InputError,
    RingAttnError,
    ToolsNotFoundError,
    in_one_line,
)

GROUP: Final = "ringattn.backends"
UNKNOWN: Final = "an unknown distribution"
_HERE: Final = "this process"
_logger: Final = logging.getLogger("ringattn")


@dataclasses.dataclass(frozen=True, eq=False)
class Registration:
    """A registered backend. Its code runs in three stages, each once: descriptor, probe and implementation.

    If a stage raises, or gives what core cannot use, the backend is broken: the error is kept, and the method of that
    stage raises a copy of it at every call. If the descriptor is broken, so are the other stages.
    """

    name: str
    backend: Backend | None
    """The descriptor, or `None` with an `error`."""
    distribution: str
    version: str
    error: RingAttnError | None = None
    given: Any = None
    """The kernel or ring function that `registered` was given in this process; `None`: imported by its path."""

    @property
    def in_process(self) -> bool:
        """Whether `registered` added the backend in this process. It then has no distribution and no version."""
        return self.distribution == _HERE

    def descriptor(self) -> Backend:
        """The backend's descriptor, which discovery has loaded."""
        if self.error is not None:
            raise again(self.error)
        assert self.backend is not None
        return self.backend

    def why_unavailable(self) -> str | None:
        """What the probe says: why the backend cannot run in this process, as one sentence; `None` if it can."""
        return _or_raise(self._reason)

    def implementation(self) -> Any:
        """The block kernel, or the ring function, that the descriptor names, imported on first use."""
        return _or_raise(self._implementation)

    @functools.cached_property
    def _reason(self) -> str | RingAttnError | None:
        path = self.descriptor().probe
        if path is None:
            return None

        def ask() -> str | None:
            reason = imported(path)()
            if reason is not None and not (isinstance(reason, str) and reason.strip()):
                raise TypeError(f"it returned {reason!r}, and must return None or a sentence")
            return reason and " ".join(reason.split())

        return _tried(self.name, self.distribution, f"its probe {path} failed", ask)

    @functools.cached_property
    def _implementation(self) -> Any:
        backend = self.descriptor()
        path = backend.kernel or backend.ring
        assert path is not None

        def load() -> Any:
            loaded = imported(path) if self.given is None else self.given
            _check_kernel(loaded, {*backend.features}) if backend.kernel else _check_ring(loaded)
            return loaded

        return _tried(self.name, self.distribution, f"cannot load {path}", load)


def _tried(name: str, distribution: str, what: str, make: Callable[[], Any]) -> Any:
    """The result of `make`, which runs code of the backend; if that raises, returns a RingAttnError instead."""
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except BackendVersionError as error:
        return error
    except BaseException as error:  # a module may even call `sys.exit`
        return BackendLoadError(name, None if distribution == _HERE else distribution, what, error)


def _or_raise(result: Any) -> Any:
    """A result of `_tried`; raises a copy of it if it is an error."""
    if isinstance(result, RingAttnError):
        raise again(result)
    return result


def imported(path: str) -> Any:
    """The object that an import path `"module:attribute"` names."""
    module, _, attribute = path.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def _check_kernel(kernel: Any, features: set[Feature]) -> None:
    if isinstance(kernel, type):
        raise TypeError("it is a class, not an instance of one")
    if hash(kernel) != hash(kernel) or kernel != kernel:
        raise TypeError("its hash changes, or it is not equal to itself: JAX would compile anew for every call")
    methods = ("forward", "backward") if Feature.GRADIENTS in features else ("forward",)
    missing = [name for name in methods if not callable(getattr(kernel, name, None))]
    if missing:
        raise TypeError(f"a block kernel needs {' and '.join(missing)}, which {kernel!r} lacks")
    beyond = sorted(feature.name for feature in features - {*getattr(kernel, "features", features)})
    if beyond:
        raise TypeError(f"its descriptor declares {', '.join(beyond)}, which its kernel cannot have")


def _check_ring(ring: Any) -> None:
    reason = mismatch(ring) if callable(ring) else f"a ring function must be callable, got {ring!r}"
    if reason is not None:
        raise TypeError(reason)


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
    """Empties all caches: the next use reads entry points, loads kernels and runs probes again."""
    _installed.cache_clear()
    for forget in on_clear:
        forget()


@contextlib.contextmanager
def registered(backend: Backend, implementation: Any = None) -> Iterator[Registration]:
    """Registers a backend in this process for a `with` block. It replaces an installed backend of that name.

    Without `implementation`, the kernel is imported from the path in the descriptor.
    """
    if not isinstance(backend, Backend):
        raise InputError("backend", f"got {backend!r}", "Pass a ringattn_core.Backend")
    registration = _registration(backend.name, _HERE, "0", lambda: backend, implementation)
    before = dict(_in_process)
    _in_process[backend.name] = registration
    try:
        yield registration
    finally:
        _in_process.clear()
        _in_process.update(before)


@functools.cache
def _installed() -> dict[str, Registration]:
    by_name: dict[str, list[Any]] = {}
    # Not with `importlib_metadata`: importing that replaces the metadata finder of the whole process.
    try:
        entries = list(importlib.metadata.entry_points(group=GROUP))
    except Exception:  # a distribution has unreadable metadata: leave out that distribution
        entries = _readable_entry_points()
    for entry in entries:
        by_name.setdefault(entry.name, []).append(entry)
    return {name: _of_entries(name, entries) for name, entries in by_name.items()}


def _readable_entry_points() -> list[Any]:
    """The entry points of distributions with readable metadata; of two with the same name, the first on the path."""
    found: dict[Any, list[Any]] = {}
    for distribution in importlib.metadata.distributions():
        name = None
        try:
            name = distribution.metadata["Name"]
            if name not in found:
                found[name] = [entry for entry in distribution.entry_points if entry.group == GROUP]
        except Exception as error:
            _logger.warning("the entry points of %s cannot be read: %s", name or "a distribution", in_one_line(error))
    return [entry for entries in found.values() for entry in entries]


def _of_entries(name: str, entries: list[Any]) -> Registration:
    owners, versions = zip(*map(distribution_of, entries), strict=True)
    if len(entries) > 1:
        return Registration(name, None, ", ".join(owners), versions[0], DuplicateBackendError(name, owners))
    return _registration(name, owners[0], versions[0], entries[0].load)


def _registration(
    name: str, distribution: str, version: str, load: Callable[[], Any], given: Any = None
) -> Registration:
    """A registration with the descriptor that `load` returns, or with the error if that is no usable descriptor.

    `given` is the backend's implementation, if it was registered in this process (`Registration.given`).
    """

    def usable() -> Backend:
        backend = load()
        if not isinstance(backend, Backend):
            raise TypeError(f"expected a ringattn_core.Backend, got {type(backend).__name__}")
        if backend.name != name:
            raise ValueError(f"its name is {backend.name!r}, and its entry point is named {name!r}")
        if backend.api not in API_VERSIONS:
            raise BackendVersionError(name, distribution, backend.api, API_VERSIONS)
        return backend

    found = _tried(name, distribution, "cannot load its descriptor", usable)
    backend, error = (found, None) if isinstance(found, Backend) else (None, found)
    return Registration(name, backend, distribution, version, error, given)


def distribution_of(entry: Any) -> tuple[str, str]:
    """The name and the version of the distribution that an entry point belongs to."""
    try:
        metadata = entry.dist.metadata  # parsed anew at each access
        name, version = metadata.get("Name"), metadata.get("Version")
    except Exception:
        name = version = None
    return str(name or UNKNOWN), str(version or "unknown")


def again(error: RingAttnError) -> RingAttnError:
    """A copy of a cached error, to raise: the cached one would collect the tracebacks and notes of all its callers."""
    fresh = type(error).__new__(type(error), *error.args)
    fresh.__dict__.update(error.__dict__)
    fresh.__cause__ = error.__cause__
    return fresh


def tool(module: str, asked_by: str) -> Any:
    """A module of `ringattn-tools`, imported by name. Without that distribution, raises what `asked_by` needs."""
    try:
        return importlib.import_module(f"ringattn_tools.{module}")
    except ModuleNotFoundError as error:
        if error.name != "ringattn_tools":
            raise
        raise ToolsNotFoundError(asked_by) from None
