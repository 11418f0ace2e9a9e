# SPDX-License-Identifier: Apache-2.0
"""How much temporary memory XLA plans for a call on devices of this machine."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import InputError
from .explanation import Compiled
from .request import AXIS, Request
from .tracing import Shard


def provide_devices(ring: int) -> None:
    """As many devices as the ring has: on CPU they are made, where JAX has not looked for any yet."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", ring)
    if len(jax.devices()) < ring:
        fact = f"needs {ring} devices and JAX sees {len(jax.devices())} ({jax.default_backend()})"
        raise InputError("--compile", fact, "Ask for a smaller ring, or set JAX_PLATFORMS=cpu")


def compiled(request: Request, shard: Shard, backend: str, gradients: bool) -> Compiled:
    """The call, and the call with its gradients, compiled and never run."""
    devices = jax.devices()[: request.ring]
    mesh = Mesh(np.array(devices), (AXIS,))
    floating = {name: placed(x, dict(shard.specs)[name], mesh) for name, x in request.floating().items()}

    forward, both = programs(request, mesh, backend)
    alone = jax.jit(forward).lower(floating).compile()
    kind = f"{len(devices)} x {devices[0].device_kind}"
    if not gradients:
        return Compiled(kind, _temporary(alone), None)
    cotangents = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), alone.out_info, alone.output_shardings
    )
    return Compiled(kind, _temporary(alone), _temporary(jax.jit(both).lower(floating, cotangents).compile()))


def programs(request: Request, mesh: Mesh, backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The call of the arrays that have a gradient; and of them and the cotangents, with every gradient."""
    integers = request.integers()

    def forward(floating: dict[str, jax.Array]) -> Any:
        return request.attend(floating, integers, mesh, backend)

    def both(floating: dict[str, jax.Array], cotangents: Any) -> Any:
        out, pull = jax.vjp(forward, floating)
        return out, pull(cotangents)

    return forward, both


def placed(x: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Split as the call splits it; whole where the ring does not divide it, and the call pads it first."""
    even = all(entry is None or length % mesh.size == 0 for entry, length in zip(spec, x.shape, strict=False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec if even else PartitionSpec()))


def _temporary(program: jax.stages.Compiled) -> int | None:
    memory = program.memory_analysis()
    return None if memory is None else memory.temp_size_in_bytes
