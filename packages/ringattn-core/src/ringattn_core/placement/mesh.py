# SPDX-License-Identifier: Apache-2.0
"""Builds a mesh whose rings connect neighbouring devices; finds the mesh of arrays, and splits arrays over it."""

import functools
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
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


def of_context(mesh: Any, x: Any) -> Any:
    """The mesh in the form in which `shard_map` takes it for the array `x`; most meshes are returned unchanged.

    Inside a `shard_map`, it is the mesh of the context. If `mesh` is abstract and no function is being traced, it is
    the mesh with devices that `jax.set_mesh` set; raises if none is set.
    """
    if axes.manual():
        return jax.sharding.get_abstract_mesh()
    if not isinstance(mesh, AbstractMesh) or isinstance(x, jax.core.Tracer):
        return mesh
    try:
        found = jax.sharding.get_mesh()
    except ValueError:  # `x` is not traced, but a function around the call is
        return mesh
    if found.empty:
        raise MeshError("the mesh is abstract, and has no devices. Call inside `jax.set_mesh`, or pass another mesh")
    return found


def of_arrays(given: Any, named: Collection[str], operands: Iterable[Any]) -> Any:
    """The mesh of a call: as given, else that of an operand with explicit axes, or that of `jax.set_mesh`.

    The mesh of `jax.set_mesh` counts only if it has an axis in `named`, and that no surrounding `shard_map` has made
    manual: over such axes, arrays are local. The result is `None` if arrays are local.
    """
    if given is not None:
        if not isinstance(given, (Mesh, AbstractMesh)):
            raise MeshError(f"mesh is {type(given).__name__}. Pass a jax.sharding.Mesh, such as jax.make_mesh makes")
        return given
    for x in filter(lambda x: isinstance(x, jax.Array), operands):
        typed = jax.typeof(x).sharding
        if any(typed.spec):
            return typed.mesh if isinstance(x, jax.core.Tracer) else x.sharding.mesh
    context = jax.sharding.get_abstract_mesh()
    return context if set(named) & (set(context.axis_names) - axes.manual()) else None


def sharding_of(x: jax.Array) -> Any:
    """The sharding of `x`, as far as JAX knows it: of a traced array, the explicit axes only."""
    return jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding


def ranks_of(mesh: Any, names: tuple[str, ...]) -> int:
    """The product of the sizes of the mesh axes `names`."""
    return math.prod(mesh.shape[name] for name in names)


def refuse_unknown_axes(argument: str, names: tuple[str, ...], mesh: Any) -> None:
    """Raises if `names`, the value of `argument`, are not all axes of the mesh."""
    for name in names:
        if name not in mesh.axis_names:
            listed = ", ".join(map(repr, mesh.axis_names))
            raise MeshError(
                f"{argument}={name!r} is not an axis of the mesh, whose axes are {listed}. Pass one of them"
            )


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
    """`work(*options, *arrays)` on each rank's shards, over the mesh axes that the specs name.

    Its results are split like the first array. `work` and `options` are hashable: equal calls compile once.
    """
    manual = {name for entry in specs[0] for name in axes.names(entry)} - axes.manual()
    # JAX cannot shard residuals of a `shard_map` inside another one (benchmarks/upstream/nested_shard_map.py). A
    # checkpoint makes the arguments the residuals.
    local = jax.checkpoint(functools.partial(work, *options))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=manual)(*arrays)
