# SPDX-License-Identifier: Apache-2.0
"""Whether a call splits its arrays over a mesh, or a surrounding `shard_map` has split them; refuses wrong axes.

Every function of core that takes `axis_name` gets its mesh and its number of ranks here (`split_of`), and so refuses
the same mistakes of axes as `ring_attention`.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.core
from jax.sharding import AbstractMesh, AxisType, Mesh

from ..errors import InputError, MeshError
from . import axes
from .mesh import explicit_spec, ranks_of, sharding_of
from .platforms import refuse_different_devices

AXIS_NAMES: Final = ("axis_name", "batch_axis_name", "head_axis_name")
Named = Mapping[str, tuple[str, ...] | None]
"""The mesh axes that each argument of `AXIS_NAMES` names; `None` if the caller does not say."""


class Split(NamedTuple):
    """The mesh axes that split the tokens of a call, and how many ranks they have; without a `mesh`, arrays are local.

    The mesh is in the form that `jax.shard_map` takes where the call is.
    """

    mesh: Any
    ring: tuple[str, ...]
    ranks: int


def split_of(
    mesh: Any,
    given: Mapping[str, Any],
    tokens: Mapping[str, Any],
    whole: Mapping[str, Any] | None = None,
    *,
    axis: int = 1,
    only_global: str = "",
) -> Split:
    """How a call is split. Raises if the axes that it names contradict the mesh, or how JAX says its arrays are split.

    Args:
        mesh: As the caller passes it. By default, it is that of an array with explicit axes, or of `jax.set_mesh`.
        given: The arguments of the call, those of `AXIS_NAMES` that it takes among them.
        tokens: The arrays, or pytrees of arrays, that the ring splits, by argument.
        whole: The arrays, or pytrees of arrays, that must be equal on all ranks of the ring, by argument.
        axis: The axis of tokens.
        only_global: The name of a function that has no form for the local arrays of a `shard_map`.
    """
    whole = whole or {}
    said = {name: given[name] for name in AXIS_NAMES if name in given}
    named = {name: None if x is None else axes.names(x, name) for name, x in said.items()}
    every = [name for names in named.values() for name in names or ()]
    if len(set(every)) < len(every):
        listed = ", ".join(f"{argument}={names}" for argument, names in named.items() if names)
        raise MeshError(f"{listed} share a mesh axis. Each mesh axis splits one axis of the arrays")
    arrays = [x for x in jax.tree.leaves([*tokens.values(), *whole.values()]) if isinstance(x, jax.Array)]
    ring, found = named["axis_name"] or (), _mesh_of(mesh, every, arrays)
    if only_global and ring and (found is None or {*ring} & axes.manual()):
        remedy = "Call it outside the shard_map" if axes.bound(ring) else "Pass mesh=, or set it by jax.set_mesh"
        raise MeshError(f"{only_global} is for global arrays, and needs a mesh with axis_name={ring}. {remedy}")
    if found is None:
        for argument, names in named.items():
            axes.size(names or (), argument)
        refuse_different_devices({**whole, **tokens})
        _refuse_replicated(ring, tokens)
        _refuse_sharded(ring, whole)
    else:
        _check_mesh(named, found)
    if named["axis_name"] is None or (found is None and ring):
        refuse_unnamed_axes(named, arrays, only_global)
    if named["axis_name"] is None:
        _refuse_unsaid_ring(tokens, axis)
    return Split(found and of_context(found, arrays), ring, axes.size(ring) if found is None else ranks_of(found, ring))


def _mesh_of(given: Any, named: list[str], arrays: list[jax.Array]) -> Any:
    """The mesh of a call: as given, else that of an array with explicit axes, or that of `jax.set_mesh`.

    The mesh of `jax.set_mesh` counts only if it has an axis in `named`. The result is `None` if arrays are local: a
    surrounding `shard_map` or `vmap` binds an axis that the call names.
    """
    if given is not None:
        if not isinstance(given, (Mesh, AbstractMesh)):
            raise MeshError(f"mesh is {type(given).__name__}. Pass a jax.sharding.Mesh, such as jax.make_mesh makes")
        return given
    context = jax.sharding.get_abstract_mesh()
    if any(axes.bound((name,)) for name in named):
        kinds = dict(zip(context.axis_names, context.axis_types, strict=True))
        left = {name: kinds[name] for name in named if name in kinds and not axes.bound((name,))}
        if left:
            remedy = "Make them manual" + (", or leave them out" if {*left.values()} == {AxisType.Auto} else "")
            raise MeshError(
                f"the surrounding shard_map is manual over only a part of the axes that the call names: JAX splits "
                f"arrays by itself over {', '.join(map(repr, left))}. {remedy}"
            )
        return None
    for x in arrays:
        if any(explicit_spec(x)):
            return sharding_of(x).mesh
    return context if {*named} & {*context.axis_names} else None


def _check_mesh(named: Named, mesh: Any) -> None:
    """Raises unless `mesh` has all axes that the call names, and no surrounding `shard_map` has made them manual."""
    context = jax.sharding.get_abstract_mesh()
    if not (context.empty or axes.manual() or mesh.abstract_mesh == context):
        raise MeshError(
            f"mesh=, or the mesh of an array with explicit axes, has the axes {_described(mesh)}, but jax.set_mesh has "
            f"set another mesh, with the axes {_described(context)}. Use one mesh for all of them"
        )
    for argument, names in named.items():
        refuse_unknown_axes(argument, names or (), mesh)
        if {*(names or ())} & axes.manual():
            raise MeshError(
                f"mesh= is for global arrays, but {argument}={names!r} belongs to a surrounding shard_map. "
                f"Leave mesh= out: inside shard_map the arrays are local"
            )


def _described(mesh: Any) -> str:
    kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return ", ".join(f"{name}={size} ({kind.name})" for (name, size), kind in kinds)


def refuse_unknown_axes(argument: str, names: tuple[str, ...], mesh: Any) -> None:
    """Raises if `names`, the value of `argument`, are not all axes of the mesh."""
    for name in names:
        if name not in mesh.axis_names:
            listed = ", ".join(map(repr, mesh.axis_names))
            raise MeshError(
                f"{argument}={name!r} is not an axis of the mesh, whose axes are {listed}. Pass one of them"
            )


def of_context(mesh: Any, arrays: list[jax.Array]) -> Any:
    """The mesh in the form in which `shard_map` takes it for these arrays; most meshes are returned unchanged.

    Inside a `shard_map`, it is the mesh of the context. If `mesh` is abstract and no function is being traced, it is
    the mesh with devices that `jax.set_mesh` set; raises if none is set.
    """
    if axes.manual():
        return jax.sharding.get_abstract_mesh()
    if not isinstance(mesh, AbstractMesh) or any(isinstance(x, jax.core.Tracer) for x in arrays[:1]):
        return mesh
    try:
        found = jax.sharding.get_mesh()
    except ValueError:  # no array is traced, but a function around the call is
        return mesh
    if found.empty:
        raise MeshError("the mesh is abstract, and has no devices. Call inside `jax.set_mesh`, or pass another mesh")
    return found


def _refuse_replicated(ring: tuple[str, ...], tokens: Mapping[str, Any]) -> None:
    """Raises if an array of tokens is replicated over the `ring`: each rank would take it for its own shard.

    JAX tracks this under `check_vma=True` only. Segment ids are not checked: the same ids on all ranks are usual.
    """
    tracked = _tracked(ring)
    for argument, tree in tokens.items():
        for x in jax.tree.leaves(tree):
            missing = tuple(sorted(tracked - axes.varying(x)))
            if missing:
                raise InputError(
                    argument,
                    f"is replicated over {missing}, over which axis_name={ring} spreads the sequence",
                    "Shard its length over the ring in in_specs, or compute it from jax.lax.axis_index. If all shards "
                    f"are equal, as zeros are, say so by jax.lax.pcast(x, {missing}, to='varying')",
                )


def _refuse_sharded(ring: tuple[str, ...], whole: Mapping[str, Any]) -> None:
    """Raises if an array that must be equal on all ranks of the ring differs between them, as far as JAX tracks it."""
    for argument, tree in whole.items():
        over = tuple(sorted(name for x in jax.tree.leaves(tree) for name in _tracked(ring) & axes.varying(x)))
        if over:
            raise InputError(
                argument,
                f"differs between the ranks of {over}, but all ranks of axis_name={ring} need the same",
                "Do not shard it over the ring in in_specs",
            )


def _tracked(ring: tuple[str, ...]) -> frozenset[str]:
    """The axes of the ring over which JAX tracks whether an array varies. Axes of size 1 do not count."""
    large = {name for name in ring if axes.size((name,)) > 1}
    return axes.tracked() & large if large else frozenset()


def refuse_unnamed_axes(named: Named, arrays: list[jax.Array], only_global: str = "") -> None:
    """Raises if a mesh axis of a `shard_map` may split the arrays, and the call does not say what the axis splits.

    A forgotten `axis_name` would take a shard for the sequence, and forgotten axes of batch or heads would pair query
    heads with wrong key heads, and repeat dropout bits. A call that gives every name passes. Under `check_vma=False`
    JAX does not say over which axes arrays vary; then any axis counts.
    """
    unsaid = [argument for argument, names in named.items() if names is None]
    if not unsaid or not arrays or not axes.manual():
        return
    split = {name for x in arrays for name in axes.varying(x)} if axes.tracked() else axes.manual()
    over = tuple(sorted(split - {name for names in named.values() for name in names or ()}))
    over = tuple(name for name in over if jax.lax.axis_size(name) > 1)
    if not over:
        return
    remedy = f"Name them in {' or '.join(unsaid)}; () means none"
    remedy += ", and axis_name=() that each rank has all tokens" if "axis_name" in unsaid else ""
    if only_global:
        remedy = f"{only_global} is for global arrays: call it outside. axis_name=() says that they split no tokens"
    raise MeshError(
        f"the mesh axes {over} of the surrounding shard_map may split the arrays, and the call does not say what they "
        f"split. {remedy}"
    )


def _refuse_unsaid_ring(tokens: Mapping[str, Any], axis: int) -> None:
    """Raises if explicit mesh axes split the axis of tokens, and the call does not name them."""
    for argument, tree in tokens.items():
        for x in jax.tree.leaves(tree):
            spec = explicit_spec(x)
            if axis < len(spec) and (over := axes.names(spec[axis])):
                listed = ", ".join(map(repr, over))
                raise MeshError(
                    f"axis_name is missing, but the mesh axes {listed} split the tokens of {argument}. Name the axis "
                    f"of the mesh that splits the sequence; () means none"
                )
