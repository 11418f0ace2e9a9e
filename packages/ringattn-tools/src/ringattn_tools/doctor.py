# SPDX-License-Identifier: Apache-2.0
"""`ringattn list`, `info` and `doctor`: which backends and devices work here, and how to repair each fault."""

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Callable
from typing import Any, Final

import importlib_metadata
import jax
from ringattn_core.backends import discovery, selection
from ringattn_core.backends.discovery import Registration
from ringattn_core.contract.features import Feature
from ringattn_core.errors import BackendNotFoundError, RingAttnError
from ringattn_core.placement.platforms import platform_of

from .output import Title, one_line, show

_LIBRARIES: Final = ("ringattn-core", "ringattn-tools", "jax", "jaxlib", "numpy", "jaxtyping", "libtpu", "triton")
_VARIABLES: Final = ("XLA_FLAGS", "JAX_PLATFORMS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


Status = dict[str, Any]
"""What a registered backend declares, and whether it can run here, as plain data, by the names that JSON shows.

`door` is "kernel" for a `BlockKernel`, "ring" for a `RingKernel`, and `implementation` its import path. `reason` says
why the backend cannot run in this process, or is `None`. A `broken` backend runs nowhere until it is repaired.
"""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `ringattn doctor` finds in this process.

    `working` are the backends that work on `platform`, the platform of JAX's devices. `default` is the backend of calls
    that name no backend. Each fault says what is wrong and what to do. `healthy`: a backend works, and none is broken.
    """

    versions: dict[str, str]
    environment: dict[str, str]
    platform: str | None
    devices: tuple[str, ...]
    backends: tuple[Status, ...]
    working: tuple[str, ...]
    default: str | None
    faults: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        return bool(self.working) and not any(backend["broken"] for backend in self.backends)


def status_of(registration: Registration, load: bool = False) -> Status:
    """The status of one backend. With `load`, its kernel is imported too, and a failure becomes the `reason`."""
    descriptor, broken = registration.backend, False
    try:
        reason = registration.why_unavailable()
        if load and reason is None:
            registration.implementation()
    except RingAttnError as error:
        reason, broken = str(error), True
    kernel, ring = (getattr(descriptor, door, None) for door in ("kernel", "ring"))
    return {
        **{name: getattr(registration, name) for name in ("name", "distribution", "version")},
        "platforms": getattr(descriptor, "platforms", ()),
        **{name: getattr(descriptor, name, None) for name in ("priority", "api")},
        "door": "kernel" if kernel else "ring" if ring else None,
        "implementation": kernel or ring,
        **{name: getattr(descriptor, name, None) for name in ("probe", "largest_head", "head_multiple")},
        "reason": reason,
        "broken": broken,
        "features": {} if descriptor is None else {feature.name: descriptor.answer(feature) for feature in Feature},
        "available": reason is None,
    }


def diagnose() -> Diagnosis:
    """Checks everything: initialises JAX, probes every backend, and loads the kernels of backends for this platform."""
    faults, devices, where = _devices()
    faults += [f"{sentence}. Correct its name, or unset it" for sentence in selection.unknown_variables()]
    found, working, default = [], [], None

    def selected(name: str | None, platform: str) -> str | None:
        """The name of the backend that a call with `backend=name` gets; an error becomes a fault."""
        try:
            return selection.select(name, frozenset(), platform).name
        except RingAttnError as error:
            faults.append(one_line(error))
            return None

    for name, registration in discovery.registrations().items():
        served = where is not None and selection.serves(registration.backend, where)
        status = status_of(registration, load=served)
        found.append(status)
        if where is not None and served:
            working += [name] if selected(name, where) else []
        elif status["broken"]:
            faults.append(status["reason"])
    if where is not None:
        default = selected(None, where)
    return Diagnosis(
        versions=_versions(),
        environment=_environment(),
        platform=where,
        devices=devices,
        backends=tuple(found),
        working=tuple(working),
        default=default,
        faults=tuple(faults),
    )


def _devices() -> tuple[list[str], tuple[str, ...], str | None]:
    """`(faults, devices, platform)`: what is wrong with JAX's devices, their kinds with counts, and their platform."""
    try:
        devices, where = jax.devices(), platform_of(None, ())
    except RuntimeError as error:
        told = " ".join(str(error).split()).rstrip(".")
        return [f"JAX finds no device: {told}. Unset JAX_PLATFORMS, or install the JAX of your device"], (), None
    kinds = [device.device_kind for device in devices]
    faults = [
        f"{plugin} is installed, but JAX runs on cpu. Check that the driver sees the device, or set JAX_PLATFORMS=cpu"
        for plugin in _plugins()
        if where == "cpu" and "JAX_PLATFORMS" not in os.environ
    ]
    return faults, tuple(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)), where


def _plugins() -> list[str]:
    """The installed distributions that add a platform to JAX, such as `jax-cuda13-plugin`."""
    points = importlib_metadata.entry_points(group="jax_plugins")
    return sorted({discovery.distribution_of(point)[0] for point in points} - {discovery.UNKNOWN})


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in dict.fromkeys((*_LIBRARIES, *_plugins())):
        try:
            found[name] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
    return found


def _environment() -> dict[str, str]:
    ours = {name for name in os.environ if name.startswith("RINGATTN_")}
    return {name: os.environ[name] for name in sorted({*ours, *_VARIABLES}) if name in os.environ}


def add_list(parser: argparse.ArgumentParser) -> None:
    _add(parser, run_list)


def add_info(parser: argparse.ArgumentParser) -> None:
    _add(parser, run_info)
    parser.add_argument("name", metavar="NAME", help="the name that `ringattn list` shows")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    _add(parser, run_doctor)


def _add(parser: argparse.ArgumentParser, run: Callable[..., int]) -> None:
    """Adds `--json` to a subcommand. `run` carries the subcommand out, and its docstring becomes the description."""
    parser.description = run.__doc__
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run_list(arguments: argparse.Namespace) -> int:
    """Lists every registered backend: its name, distribution and version, the platforms that it serves, its priority,
    how many features it supports, and whether it can run here. Loads no kernel.
    """
    found = [status_of(registration) for registration in discovery.registrations().values()]
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    if not found:
        raise BackendNotFoundError(None, ())
    rows = [
        {
            "name": backend["name"],
            "distribution": f"{backend['distribution']} {backend['version']}",
            "platforms": backend["platforms"],
            "priority": backend["priority"],
            "features": f"{sum(word == 'supported' for word in backend['features'].values())} of {len(Feature)}",
            "here": "available" if backend["available"] else "broken" if backend["broken"] else "no",
        }
        for backend in found
    ]
    reasons = {f"{backend['name']}:": backend["reason"] for backend in found if not backend["available"]}
    show(rows, *(["", reasons] if reasons else []))
    return 0


def run_info(arguments: argparse.Namespace) -> int:
    """Shows what one backend declares: its distribution, platforms, kernel and probe, whether it can run here, and its
    support of each feature. Loads its kernel. Exits with 1 where it cannot run here.
    """
    registered = discovery.registrations()
    if arguments.name not in registered:
        raise BackendNotFoundError(arguments.name, tuple(registered))
    backend = status_of(registered[arguments.name], load=True)
    if arguments.json:
        print(json.dumps(backend, indent=2))
        return int(not backend["available"])
    show({name: fact for name, fact in backend.items() if name != "features"})
    if backend["features"]:
        support = backend["features"].items()
        show("", [{"feature": name, "support": word, "what it is": Feature[name].value} for name, word in support])
    return int(not backend["available"])


def run_doctor(arguments: argparse.Namespace) -> int:
    """Checks versions, devices, the environment and every backend, and says how to repair each fault. Initialises JAX.
    Exits with 1 where no backend works, or where an installed one is broken.
    """
    found = diagnose()
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found) | {"healthy": found.healthy}, indent=2))
        return int(not found.healthy)
    idle = "has no device to run on" if found.platform is None else f"is not for {found.platform}"
    states = {backend["name"]: backend["reason"] or idle for backend in found.backends}
    for name in found.working:
        states[name] = "works, and is the default" if name == found.default else "works"
    sections = {
        "versions": found.versions,
        "devices": {found.platform or "none": ", ".join(found.devices)},
        "environment": found.environment or {"nothing set": ""},
        "backends": states or {"none": ""},
    }
    for title, facts in sections.items():
        show(Title(title), {f"  {name}": fact for name, fact in facts.items()})
    show(Title("faults" if found.faults else "no faults"), *(f"- {fault}" for fault in found.faults))
    return int(not found.healthy)
