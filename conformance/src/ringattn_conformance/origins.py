# SPDX-License-Identifier: Apache-2.0
"""Which files a run tests, and whether another copy of them is installed or on PYTHONPATH."""

import importlib.util
import os
from importlib import metadata
from pathlib import Path

from ringattn_core.backends.discovery import Registration


def file_of(registration: Registration) -> Path | None:
    """The folder or file of the top-level package of a backend's kernel; `None` if this process registered it."""
    descriptor = registration.descriptor()
    path = descriptor.kernel or descriptor.ring
    return None if registration.in_process or path is None else _imported(path.partition(":")[0].partition(".")[0])


def two_copies(registration: Registration) -> str | None:
    """Why it is unclear which code a run would test: Python imports one copy, and another is elsewhere; or `None`."""
    tested = file_of(registration)
    if tested is None:
        return None
    for where, other in (
        ("installed", _installed(registration.distribution, tested.name)),
        ("on PYTHONPATH", next(filter(Path.exists, (folder / tested.name for folder in _folders())), None)),
    ):
        if other is not None and other.resolve() != tested.resolve():
            return (
                f"Python imports {tested}, and another copy is {where}: {other}. "
                f"Remove one, or install the development copy with `pip install -e`"
            )
    return None


def _imported(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    places = spec.submodule_search_locations
    return Path(next(iter(places))) if places else Path(str(spec.origin))


def _installed(distribution: str, name: str) -> Path | None:
    """Where a distribution has its package `name`; `None` if it lists no such files, as one installed with `-e`."""
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return None
    own = next((file for file in files if file.parts[0] == name), None)
    path = None if own is None else Path(str(own.locate()))
    return None if own is None or path is None or not path.exists() else path.parents[len(own.parts) - 1] / name


def _folders() -> list[Path]:
    return [Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
