# SPDX-License-Identifier: Apache-2.0
"""How a call shards global arrays over a mesh: the specs of every input, and the padding of uneven lengths."""

import dataclasses
import functools
import math
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..backends.discovery import Registration
from ..backends.selection import select
from ..contract.call import Call
from ..errors import InputError, MeshError
from ..placement import arrays, axes
from ..placement.arrays import Roles
from ..placement.layout import pieces
from ..placement.platforms import platform_of
from ..tuning.choice import with_parameters_over_mesh
from .checks import halves_go_both_ways
from .dispatch import answer, reverse_mode_only
from .options import ARRAYS, needs

BATCH_AXES: Final = ("dp", "fsdp", "data")
HEAD_AXES: Final = ("tp", "model")


def specs(call: Call, roles: Roles) -> dict[str, P]:
    """The `PartitionSpec` of every array of the call. Axes of size 1 that are broadcast are not split."""
    given = {name: getattr(call, name) for name in ARRAYS if getattr(call, name) is not None}
    return {name: roles.spec(ARRAYS[name], x.shape) for name, x in given.items()}


@reverse_mode_only()
def sharded(call: Call, backend: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """Runs a call on global arrays: pads uneven lengths, shards the arrays, runs every shard, and cuts the padding."""
    length = call.query.shape[1]
    call, roles = prepared(call, mesh, in_specs, out_specs)
    split = specs(call, roles)
    registration = select(backend, needs(call), platform_of(mesh, ()))
    placed = {name: _placed(getattr(call, name), mesh, spec) for name, spec in split.items()}
    options = dataclasses.replace(call, **dict.fromkeys(ARRAYS))
    options = with_parameters_over_mesh(mesh, registration, options, split, placed)
    with jax.debug_infs(False):  # the lse of a row that sees no key is -inf
        result = _run(registration, options, mesh, roles, tuple(split.items()), placed)
    if call.query.shape[1] == length:
        return result
    return (result[0][:, :length], result[1][..., :length]) if call.return_lse else result[:, :length]


def prepared(call: Call, mesh: Any, in_specs: Any = None, out_specs: Any = None) -> tuple[Call, Roles]:
    """The call, padded to lengths that the ring divides, with its axis names set; and the roles of the mesh axes."""
    roles = _roles(call, mesh, in_specs, out_specs)
    call = _padded(call, math.prod(mesh.shape[name] for name in roles.sequence))
    named = {"axis_name": roles.sequence or None, "batch_axis_name": roles.batch, "head_axis_name": roles.heads}
    return dataclasses.replace(call, **named), roles


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _run(
    registration: Registration, options: Call, mesh: Mesh, roles: Roles, split: Any, placed: dict[str, jax.Array]
) -> Any:
    """The `shard_map` under `jax.jit`: equal calls compile once, even if the caller does not use `jax.jit`."""
    out, lse = roles.spec(arrays.Output), roles.spec(arrays.LogSumExp)
    shard = jax.shard_map(
        lambda local: answer(registration, dataclasses.replace(options, **local)),
        mesh=mesh,
        in_specs=(dict(split),),
        out_specs=(out, lse) if options.return_lse else out,
        check_vma=False,  # Triton and Pallas kernels do not declare over which axes results vary
    )
    return shard(placed)


def _placed(x: jax.Array, mesh: Any, spec: P) -> jax.Array:
    if not isinstance(mesh, Mesh):
        return x
    if AxisType.Explicit in mesh.axis_types and isinstance(x, jax.core.Tracer):
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return _put(x, mesh, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _put(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`device_put` with the spec. Under `vmap`, JAX's own rule would apply the spec of one example to the batch."""
    put = jax.custom_batching.custom_vmap(lambda x: jax.device_put(x, NamedSharding(mesh, spec)))
    put.def_vmap(lambda size, batched, x: (_put(x, mesh, P(None, *spec)), True))
    return put(x)


_put.defvjp(lambda x, mesh, spec: (_put(x, mesh, spec), None), lambda mesh, spec, _, dx: (dx,))


def _roles(call: Call, mesh: Any, in_specs: Any, out_specs: Any) -> Roles:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise MeshError(f"mesh is {type(mesh).__name__}. Pass a jax.sharding.Mesh, such as jax.make_mesh makes")
    sequence = call.axis_name or ()
    if set(sequence) & axes.manual():
        raise MeshError(
            f"mesh= is for global arrays, but axis_name={sequence!r} belongs to a surrounding shard_map. "
            f"Leave mesh= out: inside shard_map the arrays are local"
        )
    for argument in ("axis_name", "batch_axis_name", "head_axis_name"):
        _known(argument, getattr(call, argument) or (), mesh)
    if in_specs is not None:
        roles = _of_specs(call, in_specs, sequence, mesh)
    else:
        free = [name for name in mesh.axis_names if name not in sequence]
        batch, heads = call.batch_axis_name, call.head_axis_name
        batch = tuple(n for n in free if n in BATCH_AXES and n not in (heads or ())) if batch is None else batch
        heads = tuple(n for n in free if n in HEAD_AXES and n not in batch) if heads is None else heads
        roles = Roles(batch, sequence, heads)
        idle = [repr(name) for name in free if name not in (*batch, *heads)]
        if not sequence and idle:
            raise MeshError(
                f"axis_name is missing. Say which axis of the mesh carries the sequence: one of {', '.join(idle)}"
            )
    _divisible(call, mesh, roles)
    wanted = roles.spec(arrays.Output)
    first = out_specs[0] if isinstance(out_specs, tuple) and not isinstance(out_specs, P) else out_specs
    if first is not None and (not isinstance(first, P) or _entries("out_specs", first) != _entries("", wanted)):
        raise MeshError(f"out_specs {first} must equal that of the query, {wanted}. Pass that, or leave out_specs out")
    return roles


def _known(argument: str, names: tuple[str, ...], mesh: Any) -> None:
    for name in names:
        if name not in mesh.axis_names:
            listed = ", ".join(map(repr, mesh.axis_names))
            raise MeshError(
                f"{argument}={name!r} is not an axis of the mesh, whose axes are {listed}. Pass one of them"
            )


def _of_specs(call: Call, in_specs: Any, sequence: tuple[str, ...], mesh: Any) -> Roles:
    """The roles of the mesh axes in the specs of query, key and value; all other specs follow from the roles."""
    given = tuple(in_specs) if isinstance(in_specs, (tuple, list)) and not isinstance(in_specs, P) else ()
    if len(given) != 3 or any(not isinstance(spec, P) for spec in given):
        raise MeshError(
            f"in_specs={in_specs!r} must be the PartitionSpecs of query, key and value, and of nothing else: "
            f"those of other arrays follow from them. Pass three"
        )
    for number, spec in enumerate(given):
        for names in _entries(f"in_specs[{number}]", spec):
            _known(f"in_specs[{number}]", names, mesh)
    batch, tokens, heads, rest = _entries("in_specs[0]", given[0])
    if rest or tokens != sequence:
        raise MeshError(f"in_specs[0]={given[0]} must shard axis 1 over axis_name={sequence} and leave axis 3 whole")
    for number in (1, 2):
        if _entries("", given[number]) != _entries("", given[0]):
            raise MeshError(f"in_specs[{number}]={given[number]} must equal that of the query, {given[0]}")
    for argument, found in (("batch_axis_name", batch), ("head_axis_name", heads)):
        named = getattr(call, argument)
        if named is not None and named != found:
            raise MeshError(f"{argument}={named} disagrees with in_specs[0]={given[0]}. Pass only one")
    return Roles(batch, tokens, heads)


def _divisible(call: Call, mesh: Any, roles: Roles) -> None:
    for argument, number, names, what in (
        ("query", call.query.shape[0], roles.batch, "batch"),
        ("query", call.query.shape[2], roles.heads, "heads"),
        ("key", call.key.shape[2], roles.heads, "heads"),
    ):
        parts = math.prod(mesh.shape[name] for name in names)
        if number % parts:
            raise MeshError(
                f"{argument} has {what} {number}, which the {parts} ranks of mesh axes {names} do not divide. "
                f"Pass in_specs that leave that axis whole, or another mesh"
            )
    if call.two_way:
        halves_go_both_ways(call.key.shape[2] // math.prod(mesh.shape[name] for name in roles.heads))
    ranks = math.prod(mesh.shape[name] for name in roles.sequence)
    parts = ranks * pieces(call.layout)
    for argument, x in (("query", call.query), ("key", call.key)):
        if call.layout != "contiguous" and x.shape[1] % parts:
            following = -(-x.shape[1] // parts) * parts
            raise InputError(
                "layout",
                f"{call.layout!r} on {ranks} ranks needs lengths that {parts} divides, but {argument} has {x.shape[1]}",
                f"Pad it to {following}, or use 'contiguous', which pads by itself",
            )


def _padded(call: Call, ranks: int) -> Call:
    """Pads to lengths that the ring divides. Padding keys get a negative segment id; `sharded` cuts padding queries."""
    more = (-call.query.shape[1] % ranks, -call.key.shape[1] % ranks)
    if more == (0, 0):
        return call
    if more[1] and call.q_segment_ids is None:
        ids = {
            f"{side}_segment_ids": jnp.zeros(x.shape[:2], jnp.int32)
            for side, x in (("q", call.query), ("kv", call.key))
        }
        call = dataclasses.replace(call, **ids)
    extra = {"T": more[0], "S": more[1], "S_global": more[1], "t": more[0]}
    grown = {}
    for name, array in ARRAYS.items():
        x = getattr(call, name)
        if x is not None and x.ndim:  # the seed has no axes, and jnp.pad refuses it
            named = zip(arrays.letters(array, x.ndim), x.shape, strict=True)
            whole = call.query.shape[1] != 1
            widths = [(0, 0 if a == "t" and n == 1 and whole else extra.get(a, 0)) for a, n in named]
            grown[name] = jnp.pad(x, widths, constant_values=-1 if name.endswith("_segment_ids") else 0)
    return dataclasses.replace(call, **grown)


def _entries(argument: str, spec: P) -> tuple[tuple[str, ...], ...]:
    if len(spec) > 4:
        raise MeshError(f"{argument}={spec} has {len(spec)} entries, but the arrays have four axes. Pass at most four")
    return tuple(axes.names(entry, argument) for entry in (*spec, *[None] * (4 - len(spec))))
