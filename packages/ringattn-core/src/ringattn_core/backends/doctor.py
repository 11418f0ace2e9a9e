# SPDX-License-Identifier: Apache-2.0
"""Which backends and devices work in this process, and how to repair each fault."""

import os
import platform
from typing import Any, Final

import importlib_metadata
import jax

from ..contract.features import Feature
from ..errors import RingAttnError
from ..placement.platforms import platform_of
from . import discovery, selection
from .discovery import Registration

_LIBRARIES: Final = ("ringattn-core", "jax", "jaxlib", "numpy", "jaxtyping", "libtpu", "triton")
_VARIABLES: Final = ("XLA_FLAGS", "JAX_PLATFORMS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def backends() -> list[dict[str, Any]]:
    """The status of every registered backend, found without loading kernels."""
    return [backend_of(registration) for registration in discovery.registrations().values()]


def backend_of(registration: Registration, load: bool = False) -> dict[str, Any]:
    """The status of one backend, as plain data. With `load`, its kernel is imported too.

    The `reason` says why the backend cannot run in this process, or is `None`. A backend that is `broken` runs on no
    machine until somebody repairs it.
    """
    descriptor, broken = registration.backend, registration.why_broken(load)
    reason = registration.why_unavailable() if broken is None else str(broken)
    return {
        "name": registration.name,
        "distribution": registration.distribution,
        "version": registration.version,
        "platforms": descriptor.platforms if descriptor else (),
        "priority": descriptor.priority if descriptor else None,
        "api": descriptor.api if descriptor else None,
        "door": None if descriptor is None else "kernel" if descriptor.kernel else "ring",
        "implementation": (descriptor.kernel or descriptor.ring) if descriptor else None,
        "probe": descriptor.probe if descriptor else None,
        "reason": reason,
        "broken": broken is not None,
        "features": {feature.name: descriptor.answer(feature) for feature in Feature} if descriptor else {},
        "available": reason is None,
    }


def diagnose() -> dict[str, Any]:
    """Checks everything: initialises JAX, probes every backend, and loads the kernels of backends for this platform.

    The result is plain data. It is `healthy` if some backend works on the platform of its devices and no installed one
    is broken. `working` are the backends that work there; `default` runs calls that name none. Each of the `faults`
    says what is wrong and what to do.
    """
    faults, devices, where = _devices()
    faults += [f"{sentence}. Correct its name, or unset it" for sentence in selection.unknown_variables()]
    found, working, default = [], [], None
    for name, registration in discovery.registrations().items():
        served = where is not None and selection.serves(registration.backend, where)
        status = backend_of(registration, load=served)
        found.append(status)
        if where is not None and served:
            try:
                working.append(selection.select(name, frozenset(), where).name)
            except RingAttnError as error:
                faults.append(error.one_line())
        elif status["broken"]:
            faults.append(status["reason"])
    if where is not None:
        try:
            default = selection.select(None, frozenset(), where).name
        except RingAttnError as error:
            faults.append(error.one_line())
    return {
        "versions": _versions(),
        "environment": _environment(),
        "platform": where,
        "devices": devices,
        "backends": found,
        "working": working,
        "default": default,
        "faults": faults,
        "healthy": bool(working) and not any(status["broken"] for status in found),
    }


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
