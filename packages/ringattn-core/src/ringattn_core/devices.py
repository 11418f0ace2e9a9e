# SPDX-License-Identifier: Apache-2.0
"""On which platform a call will run: that of its mesh, not of the default device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core


def platform_of(mesh: Any, arrays: Sequence[Any]) -> str:
    """`"cpu"`, `"tpu"`, `"cuda"` or `"rocm"`: of the mesh, the surrounding mesh, the arrays, or the default device."""
    for candidate in (mesh, jax.sharding.get_abstract_mesh()):
        named = _of_mesh(candidate)
        if named is not None:
            return named
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return _of_device(next(iter(array.devices())))
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        return _of_device(jax.devices(default)[0])
    return _of_device(default or jax.devices()[0])


def _of_mesh(mesh: Any) -> str | None:
    if isinstance(mesh, jax.sharding.Mesh):
        return _of_device(mesh.devices.flat[0])
    device = getattr(mesh, "abstract_device", None)
    if device is None:
        return None
    kind = device.device_kind.lower()
    if kind == "cpu" or kind.startswith("tpu"):
        return kind[:3]
    return "rocm" if "amd" in kind or "instinct" in kind else "cuda"


def _of_device(device: Any) -> str:
    if device.platform in ("gpu", "cuda", "rocm"):
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return device.platform
