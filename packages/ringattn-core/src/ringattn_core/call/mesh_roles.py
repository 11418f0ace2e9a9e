# SPDX-License-Identifier: Apache-2.0
"""Which axes of a mesh split the batch, the sequence and the heads of a call on global arrays."""

from collections.abc import Mapping
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec as P

from ..contract.call import Call
from ..errors import MeshError
from ..placement import axes
from ..placement.arrays import BATCH_AXES, Roles
from ..placement.layout import refuse_indivisible
from ..placement.mesh import explicit_spec, ranks_of
from ..placement.split import AXIS_NAMES, Split, refuse_unknown_axes, refuse_unnamed_axes, split_of
from .entry import warn

HEAD_AXES: Final = ("tp", "model", "tensor")


def roles_of(call: Call, mesh: Any, in_specs: Any, out_specs: Any) -> Roles:
    """Which mesh axes split which axis of the arrays, from the call, its specs or the names of the mesh axes.

    Raises if the specs contradict the call, or if the sizes of the arrays do not fit the mesh.
    """
    roles = named_roles(call, mesh) if in_specs is None else _of_specs(call, in_specs, mesh)
    refuse_indivisible_axes(call, mesh, roles)
    if call.placement.layout != "contiguous":  # `sharding.prepared` pads contiguous sequences
        for argument, x in (("query", call.query), ("key", call.key)):
            refuse_indivisible(argument, x.shape[1], call.placement.layout, ranks_of(mesh, roles.sequence))
    if out_specs is not None:
        _check_out_specs(call, roles, out_specs)
    return roles


def split_of_call(
    mesh: Any, options: Mapping[str, Any], tokens: Mapping[str, Any], whole: Mapping[str, Any] | None = None
) -> Split:
    """How a call with these options is split, as `split_of` says. Raises for local arrays with explicit mesh axes.

    Warns if `jax.set_mesh` has set a mesh and the options give no axis name at all, not even `()`.
    """
    found = split_of(mesh, options, tokens, whole)
    entries = [entry for x in jax.tree.leaves([tokens, whole]) for entry in explicit_spec(x)]
    if found.mesh is None and (left := sorted({name for entry in entries for name in axes.names(entry)})):
        raise MeshError(
            f"the explicit mesh axes {', '.join(map(repr, left))} split the arrays, and the surrounding shard_map does "
            f"not. Make them manual too: name them in its axis_names, or leave axis_names out"
        )
    context = jax.sharding.get_abstract_mesh()
    unused = [name for name, size in context.shape.items() if size > 1]
    unsaid = all(options.get(argument) is None for argument in AXIS_NAMES)
    if found.mesh is None and unused and unsaid and not axes.manual():
        warn(
            f"jax.set_mesh has set a mesh with the axes {', '.join(map(repr, unused))}, and the call names none of "
            f"them, so it is not split over the mesh. Pass axis_name=, the axis that splits the sequence, or mesh= if "
            f"none does. axis_name=() says that the arrays are local"
        )
    return found


def refuse_repeated_indices(call: Call) -> None:
    """Raises if dropout, or masks that differ between heads, may count rows or heads of a shard as those of all.

    They need to know of every mesh axis of a surrounding `shard_map` whether it splits the batch or the heads.
    """
    if call.rule.dropout_prob or (call.mask_builder is not None and len(call.mask_builder.masks) > 1):
        named = {name: getattr(call.placement, name) for name in AXIS_NAMES}
        refuse_unnamed_axes(named | {"axis_name": call.placement.roles.sequence}, [call.query, call.key, call.value])


def named_roles(call: Call, mesh: Any) -> Roles:
    """The mesh axes for sequence, batch and heads. If the call names none for batch or heads, usual names decide.

    The usual names are `BATCH_AXES` and `HEAD_AXES`. Warns of mesh axes that split nothing.
    """
    sequence = call.placement.roles.sequence
    batch, heads = call.placement.batch_axis_name, call.placement.head_axis_name
    all_named = None not in (call.placement.axis_name, batch, heads)
    free = [name for name in mesh.axis_names if name not in sequence and name not in axes.manual()]
    batch = tuple(n for n in free if n in BATCH_AXES and n not in (heads or ())) if batch is None else batch
    heads = tuple(n for n in free if n in HEAD_AXES and n not in batch) if heads is None else heads
    idle = [name for name in free if name not in (*batch, *heads)]
    if call.placement.axis_name is None and idle:
        raise MeshError(
            f"axis_name is missing. Say which axis of the mesh splits the sequence: one of "
            f"{', '.join(map(repr, idle))}; () means none"
        )
    kept_whole = (*(BATCH_AXES if batch == () else ()), *(HEAD_AXES if heads == () else ()))
    idle = [name for name in idle if mesh.shape[name] > 1 and name not in kept_whole]
    if idle and not all_named:
        warn(
            f"nothing is split over the mesh axes {', '.join(map(repr, idle))}, whose ranks repeat each other's work. "
            f"Pass {_remedy(call, idle[0])} to split over them; () means none"
        )
    return Roles(batch, sequence, heads)


def _remedy(call: Call, idle: str) -> str:
    """The arguments with which a call would split something over the `idle` axis of its mesh."""
    if idle in BATCH_AXES and call.placement.batch_axis_name:
        return f"batch_axis_name={(*call.placement.batch_axis_name, idle)}"
    if idle in HEAD_AXES and call.placement.head_axis_name:
        return f"head_axis_name={(*call.placement.head_axis_name, idle)}"
    unsaid = [name for name in ("head_axis_name", "batch_axis_name") if getattr(call.placement, name) is None]
    return " or ".join(f"{name}={idle!r}" for name in unsaid)


def _of_specs(call: Call, in_specs: Any, mesh: Any) -> Roles:
    """The roles that the specs of query, key and value give. The specs of all other arrays follow from the roles."""
    given = tuple(in_specs) if isinstance(in_specs, (tuple, list)) and not isinstance(in_specs, P) else ()
    if len(given) != 3 or any(not isinstance(spec, P) for spec in given):
        raise MeshError(
            f"in_specs={in_specs!r} must be the PartitionSpecs of query, key and value, and of nothing else: "
            f"those of other arrays follow from them. Pass three"
        )
    for number, spec in enumerate(given):
        for names in _entries(f"in_specs[{number}]", spec):
            refuse_unknown_axes(f"in_specs[{number}]", names, mesh)
    sequence, (batch, tokens, heads, rest) = call.placement.roles.sequence, _entries("in_specs[0]", given[0])
    if rest or tokens != sequence or any(_entries("", spec) != (batch, tokens, heads, rest) for spec in given[1:]):
        raise MeshError(
            f"in_specs={in_specs} must split query, key and value alike, axis 1 over axis_name={sequence}, and leave "
            f"axis 3 whole. Pass equal specs, or leave in_specs out"
        )
    if len({*batch, *tokens, *heads}) < len(batch) + len(tokens) + len(heads):
        raise MeshError(f"in_specs={in_specs} name a mesh axis twice. Each mesh axis splits one axis of the arrays")
    for argument, found in (("batch_axis_name", batch), ("head_axis_name", heads)):
        named = getattr(call.placement, argument)
        if named is not None and named != found:
            raise MeshError(f"{argument}={named} disagrees with in_specs[0]={given[0]}. Pass only one")
    return Roles(batch, tokens, heads)


def _check_out_specs(call: Call, roles: Roles, out_specs: Any) -> None:
    """Raises unless `out_specs` is the spec of the output, or a tuple of it and specs of other results, in order."""
    given = tuple(out_specs) if isinstance(out_specs, (tuple, list)) and not isinstance(out_specs, P) else (out_specs,)
    wanted = [roles.spec(kind) for kind in call.results.values()]
    fit = all(
        isinstance(spec, P) and _entries("out_specs", spec) == _entries("", own)
        for spec, own in zip(given, wanted, strict=False)
    )
    if not given or len(given) > len(wanted) or not fit:
        raise MeshError(
            f"out_specs={out_specs} must be {wanted[0]}, the spec of the query"
            f"{''.join(f', or with {spec} after it' for spec in wanted[1:])}. "
            f"Pass that, or leave out_specs out"
        )


def refuse_indivisible_axes(call: Call, mesh: Any, roles: Roles) -> None:
    """Raises if the mesh axes do not divide the batch or the number of query heads."""
    for number, names, what, argument in (
        (call.query.shape[0], roles.batch, "batch", "batch_axis_name"),
        (call.query.shape[2], roles.heads, "heads", "head_axis_name"),
    ):
        parts = ranks_of(mesh, names)
        if number % parts:
            raise MeshError(
                f"query has {what} {number}, which the {parts} ranks of mesh axes {names} do not divide. "
                f"Pass {argument}=() or in_specs that leave that axis whole, or another mesh"
            )


def _entries(argument: str, spec: P) -> tuple[tuple[str, ...], ...]:
    if len(spec) > 4:
        raise MeshError(f"{argument}={spec} has {len(spec)} entries, but the arrays have four axes. Pass at most four")
    return tuple(axes.names(entry, argument) for entry in (*spec, *[None] * (4 - len(spec))))
