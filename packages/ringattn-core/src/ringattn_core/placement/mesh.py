# SPDX-License-Identifier: Apache-2.0
"""Builds a mesh whose rings connect neighbouring devices; finds the mesh of arrays, and splits arrays over it."""

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import MeshError
from . import axes
from .device_order import rings


def ring_mesh(
    devices: Sequence[Any] | None = None, axis_name: str = "sp", axis_sizes: Mapping[str, int] | None = None
) -> Mesh:
    """A mesh whose axis `axis_name` is a ring of short hops. By default it is the only axis, over all devices.

    On TPUs every hop of the ring, also from the last rank to the first, is one link of the grid, or at most two if the
    devices form a line or are odd in number. With `axis_sizes`, as in `{"data": 8, "sp": 8}`, each ring is a compact
    box of the grid, and the other axes count the boxes. CPUs and GPUs keep their order, and each ring has consecutive
    devices: GPUs have coordinates too, but no grid of links, and XLA optimises only where the devices are in order.

    Args:
        devices: The devices of the mesh, by default `jax.devices()`.
        axis_name: The name of the ring's axis.
        axis_sizes: The size of every axis, the ring's among them. Their product is the number of devices.
    """
    found = list(np.asarray(jax.devices() if devices is None else devices, dtype=object).flat)
    if not all(hasattr(device, "platform") for device in found):
        raise MeshError(f"devices={devices!r} are not devices. Pass some of jax.devices(), such as jax.devices()[:4]")
    if axis_sizes is not None and not isinstance(axis_sizes, Mapping):
        raise MeshError(f"axis_sizes={axis_sizes!r} names no axes. Pass a dict of sizes, such as {{{axis_name!r}: 8}}")
    for name in (axis_name, *(axis_sizes or ())):
        if not isinstance(name, str):
            raise MeshError(f"the axis name {name!r} is {type(name).__name__}. Pass a string, such as 'sp'")
    sizes = {axis_name: len(found)} if axis_sizes is None else dict(axis_sizes)
    if axis_name not in sizes:
        raise MeshError(f"axis_name={axis_name!r} is not in axis_sizes={sizes}. Give it a size there")
    counts = all(isinstance(size, numbers.Integral) and size > 0 for size in sizes.values())
    if not counts or math.prod(sizes.values()) != len(found):
        raise MeshError(
            f"axis_sizes={sizes} do not fit {len(found)} devices. Pass positive sizes whose product is that number"
        )
    ranks = sizes[axis_name]
    if all(device.platform == "tpu" for device in found):
        found = [device for ring in rings(found, ranks) for device in ring]
    elif len(set(found)) < len(found):
        raise MeshError("devices holds one device twice. Pass each device once")
    others = [size for name, size in sizes.items() if name != axis_name]
    grid = np.array(found, dtype=object).reshape(*others, ranks)
    return Mesh(np.moveaxis(grid, -1, list(sizes).index(axis_name)), tuple(sizes))


def sharding_of(x: jax.Array) -> Any:
    """The sharding of `x`, as far as JAX knows it: of a traced array, the explicit axes only."""
    return jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding


def explicit_spec(x: Any) -> tuple[Any, ...]:
    """The explicit mesh axes that split each axis of `x`; empty if `x` is no JAX array."""
    return (*jax.typeof(x).sharding.spec,) if isinstance(x, jax.Array) else ()


def ranks_of(mesh: Any, names: tuple[str, ...]) -> int:
    """The product of the sizes of the mesh axes `names`."""
    return math.prod(mesh.shape[name] for name in names)


def over_explicit(x: jax.Array, mesh: Any, spec: P) -> jax.Array:
    """Shards the array over the explicit axes of the mesh as the spec says. XLA decides about the other axes."""
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return x
    if isinstance(mesh, Mesh) and not isinstance(x, jax.core.Tracer):
        return jax.device_put(x, NamedSharding(mesh, spec))
    kept = [tuple(name for name in axes.names(entry) if name in explicit) or None for entry in spec]
    around = jax.sharding.get_abstract_mesh()  # JAX 0.10.0 cannot enter a mesh again while it traces
    return jax.sharding.reshard(x, NamedSharding(around if around == mesh.abstract_mesh else mesh, P(*kept)))


def placed(x: jax.Array, mesh: Any, spec: P) -> jax.Array:
    """Shards the array over all axes of the mesh as the spec says.

    `x` stays as it is if the mesh is abstract and has no explicit axes.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return _put(x, mesh, spec) if isinstance(mesh, Mesh) else x
    return over_explicit(x, mesh, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _put(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`device_put` with the spec. Under `vmap`, JAX's own rule would apply the spec of one example to the batch.

    `benchmarks/upstream/device_put_in_vmap.py` shows it.
    """
    put = jax.custom_batching.custom_vmap(lambda x: jax.device_put(x, NamedSharding(mesh, spec)))
    put.def_vmap(lambda size, batched, x: (_put(x, mesh, P(None, *spec)), True))
    return put(x)


_put.defvjp(lambda x, mesh, spec: (_put(x, mesh, spec), None), lambda mesh, spec, _, dx: (dx,))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def over_shards(
    work: Callable[..., Any], options: tuple[Any, ...], mesh: Any, specs: tuple[P, ...], *arrays: jax.Array
) -> Any:
    """`work(*options, *arrays)` on each rank's shards, over the mesh axes that the first spec names.

    Its results are split like the first array. `work` and `options` are hashable: equal calls compile once.
    """
    manual = {name for entry in specs[0] for name in axes.names(entry)} - axes.manual()
    # JAX cannot shard residuals of a `shard_map` inside another one (benchmarks/upstream/nested_shard_map.py). A
    # checkpoint makes the arguments the residuals.
    local = jax.checkpoint(functools.partial(work, *options))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=manual)(*arrays)
