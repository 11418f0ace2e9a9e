# SPDX-License-Identifier: Apache-2.0
"""Finds the platform on which a call will run: of its mesh, else of its arrays, else of the default device."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core

from ..errors import InputError


def platform_of(mesh: Any, arrays: Sequence[Any]) -> str:
    """`"cpu"`, `"tpu"`, `"cuda"` or `"rocm"`: of the mesh, the surrounding mesh, the arrays, or the default device."""
    device = device_of(mesh, arrays)
    if not isinstance(device, jax.sharding.AbstractDevice):
        if device.platform not in ("gpu", "cuda", "rocm"):
            return device.platform
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    kind = device.device_kind.lower()
    if kind == "cpu" or kind.startswith("tpu"):
        return kind[:3]
    return "rocm" if "amd" in kind or "instinct" in kind else "cuda"


def device_of(mesh: Any, arrays: Sequence[Any]) -> Any:
    """One device of the call, or the `AbstractDevice` of an abstract mesh. Both have a `device_kind`."""
    for candidate in (mesh, jax.sharding.get_abstract_mesh()):
        if isinstance(candidate, jax.sharding.Mesh):
            return candidate.devices.flat[0]
        if (named := getattr(candidate, "abstract_device", None)) is not None:
            return named
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return next(iter(array.devices()))
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        return jax.devices(default)[0]
    return default or jax.devices()[0]


def refuse_different_devices(arrays: Mapping[str, Any]) -> None:
    """Raises if the caller put arrays, given by name, on different devices: one program cannot read them all.

    A value may be a pytree of arrays.
    """
    named = [(argument, x) for argument, tree in arrays.items() for x in jax.tree.leaves(tree)]
    if any(isinstance(x, jax.core.Tracer) for _, x in named):
        return  # to a traced program the other arrays are constants, which have no device
    first = None
    for argument, x in named:
        if not isinstance(x, jax.Array) or not x.committed:
            continue
        found = x.devices()
        if first is None:
            first = argument, found
        if found != first[1]:
            raise InputError(
                argument,
                f"is on {_listed(found)}, but {first[0]} is on {_listed(first[1])}",
                "Put all arrays on the same devices, with jax.device_put",
            )


def _listed(devices: set[Any]) -> str:
    return ", ".join(sorted(map(str, devices)))
