# SPDX-License-Identifier: Apache-2.0
"""How global arrays are laid over a mesh: the specs of every input, and the padding of uneven lengths."""

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
from ..masks.builder import build
from ..placement import axes
from ..placement.layout import pieces
from ..placement.platforms import platform_of
from ..tuning.choice import settled_over
from .dispatch import answer
from .validation import halves_go_both_ways

BATCH_AXES: Final = ("dp", "fsdp", "data")
HEAD_AXES: Final = ("tp", "model")
ARRAYS: Final = (
    "query", "key", "value", "q_segment_ids", "kv_segment_ids", "softmax_aux", "bias", "attention_mask",
    "q_positions", "kv_positions", "alibi_slopes", "dropout_seed",
)  # fmt: skip
LENGTH_AXES: Final = {
    "query": (1, None), "key": (None, 1), "value": (None, 1), "q_segment_ids": (1, None), "kv_segment_ids": (None, 1),
    "q_positions": (-1, None), "kv_positions": (None, -1), "bias": (2, 3), "attention_mask": (2, 3),
}  # fmt: skip
"""The axes of each array that grow when queries and keys are padded."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which mesh axes carry the batch, the sequence and the heads."""

    batch: tuple[str, ...]
    sequence: tuple[str, ...]
    heads: tuple[str, ...]

    def specs(self, call: Call) -> dict[str, P]:
        """A spec for every array that the call has; axes of size 1 are broadcast and stay whole."""
        tokens = P(_entry(self.batch), _entry(self.sequence), _entry(self.heads), None)
        found = dict.fromkeys(("query", "key", "value"), tokens)
        found |= dict.fromkeys(("q_segment_ids", "kv_segment_ids"), P(*tokens[:2]))
        found |= {"softmax_aux": P(tokens[2], None), "alibi_slopes": P(tokens[2]), "dropout_seed": P()}
        for name in ("q_positions", "kv_positions"):
            positions = getattr(call, name)
            if positions is not None:
                found[name] = P(tokens[1]) if positions.ndim == 1 else P(*tokens[:2])
        for name in ("bias", "attention_mask"):
            array = getattr(call, name)
            if array is not None:
                entries = (tokens[0], tokens[2], tokens[1])
                found[name] = P(*(e if n > 1 else None for e, n in zip(entries, array.shape, strict=False)), None)
        return {name: found[name] for name in ARRAYS if getattr(call, name) is not None}


def sharded(call: Call, backend: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """The call on global arrays: padded where the ring does not divide it, sharded, answered and cut."""
    length = call.query.shape[1]
    call, roles = prepared(call, mesh, in_specs, out_specs)
    specs = roles.specs(call)
    registration = select(backend, call.needs(), platform_of(mesh, ()))
    arrays = {name: _placed(getattr(call, name), mesh, spec) for name, spec in specs.items()}
    options = dataclasses.replace(call, **dict.fromkeys(ARRAYS))
    options = settled_over(mesh, registration, options, specs, arrays)
    with jax.debug_infs(False):  # the lse of a row that sees no key is -inf on purpose
        result = _run(registration, options, mesh, roles, tuple(specs.items()), arrays)
    if call.query.shape[1] == length:
        return result
    return (result[0][:, :length], result[1][..., :length]) if call.return_lse else result[:, :length]


def prepared(call: Call, mesh: Any, in_specs: Any = None, out_specs: Any = None) -> tuple[Call, Roles]:
    """The call with lengths that the ring divides, masks of global heads and the axes of every shard; and its roles."""
    roles = _roles(call, mesh, in_specs, out_specs)
    ranks = math.prod(mesh.shape[name] for name in roles.sequence)
    if call.mask_builder is not None:
        heads, key_heads = call.query.shape[2], call.key.shape[2]
        built = build(call.mask_builder, call.query.shape[1], call.key.shape[1], heads, key_heads)
        call = dataclasses.replace(call, mask_builder=built)
    names = {"batch_axis_name": roles.batch or None, "head_axis_name": roles.heads or None}
    return dataclasses.replace(_padded(call, ranks), axis_name=roles.sequence, **names), roles


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _run(
    registration: Registration, options: Call, mesh: Mesh, roles: Roles, specs: Any, arrays: dict[str, jax.Array]
) -> Any:
    """Compiled once for equal calls, also where the caller does not use `jax.jit`."""
    out = P(_entry(roles.batch), _entry(roles.sequence), _entry(roles.heads), None)
    lse = P(out[0], out[2], out[1])
    shard = jax.shard_map(
        lambda local: answer(registration, dataclasses.replace(options, **local)),
        mesh=mesh,
        in_specs=(dict(specs),),
        out_specs=(out, lse) if options.return_lse else out,
        check_vma=False,  # kernels of Triton and Pallas cannot say what their results vary over
    )
    return shard(arrays)


def _placed(x: jax.Array, mesh: Any, spec: P) -> jax.Array:
    if not isinstance(mesh, Mesh):
        return x
    if AxisType.Explicit in mesh.axis_types and isinstance(x, jax.core.Tracer):
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return _put(x, mesh, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _put(x: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`device_put`, and under `vmap` that of the whole batch: JAX would put it by the axes of one example."""
    put = jax.custom_batching.custom_vmap(lambda x: jax.device_put(x, NamedSharding(mesh, spec)))
    put.def_vmap(lambda size, batched, x: (_put(x, mesh, P(None, *spec)), True))
    return put(x)


_put.defvjp(lambda x, mesh, spec: (_put(x, mesh, spec), None), lambda mesh, spec, _, dx: (dx,))


def _roles(call: Call, mesh: Any, in_specs: Any, out_specs: Any) -> Roles:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise MeshError(f"mesh is {type(mesh).__name__}. Pass a jax.sharding.Mesh, such as jax.make_mesh makes")
    known = tuple(mesh.axis_names)
    listed = ", ".join(map(repr, known))
    sequence = call.axis_name or ()
    if not sequence:
        raise MeshError(f"axis_name is missing. Say which axis of the mesh carries the sequence: one of {listed}")
    if set(sequence) & set(jax.sharding.get_abstract_mesh().manual_axes):
        raise MeshError(
            f"mesh= is for global arrays, but axis_name={call.axis_name!r} belongs to a surrounding shard_map. "
            f"Leave mesh= out: inside shard_map the arrays are local"
        )
    given = {"axis_name": sequence, "batch_axis_name": call.batch_axis_name, "head_axis_name": call.head_axis_name}
    for argument, names in given.items():
        for name in names or ():
            if name not in known:
                raise MeshError(
                    f"{argument}={name!r} is not an axis of the mesh, whose axes are {listed}. Pass one of them"
                )
    free = [name for name in known if name not in sequence]
    batch = call.batch_axis_name or tuple(name for name in free if name in BATCH_AXES)
    heads = call.head_axis_name or tuple(name for name in free if name in HEAD_AXES)
    roles = Roles(batch, sequence, heads) if in_specs is None else _of_specs(call, in_specs, sequence)
    _divisible(call, mesh, roles)
    wanted = P(_entry(roles.batch), _entry(roles.sequence), _entry(roles.heads), None)
    first = out_specs[0] if isinstance(out_specs, tuple) and not isinstance(out_specs, P) else out_specs
    if first is not None and _entries(first) != _entries(wanted):
        raise MeshError(f"out_specs {first} must be that of the query, {wanted}. Pass that, or leave out_specs out")
    return roles


def _of_specs(call: Call, in_specs: Any, sequence: tuple[str, ...]) -> Roles:
    """The roles that the specs of query, key and value spell out; those of the rest follow from them."""
    specs = tuple(in_specs)
    if len(specs) < 3 or any(not isinstance(spec, P) for spec in specs[:3]):
        raise MeshError(f"in_specs={in_specs!r} must begin with the PartitionSpecs of query, key and value")
    batch, tokens, heads, rest = _entries(specs[0])
    if rest or tokens != sequence:
        raise MeshError(f"in_specs[0]={specs[0]} must shard axis 1 over axis_name={sequence} and leave axis 3 whole")
    for number in (1, 2):
        if _entries(specs[number]) != _entries(specs[0]):
            raise MeshError(f"in_specs[{number}]={specs[number]} must be that of the query, {specs[0]}")
    for argument, named, found in (
        ("batch_axis_name", call.batch_axis_name, batch),
        ("head_axis_name", call.head_axis_name, heads),
    ):
        if named is not None and named != found:
            raise MeshError(f"{argument}={named} disagrees with in_specs[0]={specs[0]}. Pass one of the two")
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
    """Lengths that the ring divides: keys that are padding belong to no segment, queries are cut later."""
    more = (-call.query.shape[1] % ranks, -call.key.shape[1] % ranks)
    if more == (0, 0):
        return call
    if more[1] and call.q_segment_ids is None:
        ids = {
            f"{side}_segment_ids": jnp.zeros(x.shape[:2], jnp.int32)
            for side, x in (("q", call.query), ("kv", call.key))
        }
        call = dataclasses.replace(call, **ids)
    grown = {}
    for name, growing in LENGTH_AXES.items():
        x = getattr(call, name)
        if x is None:
            continue
        widths = [[0, 0] for _ in x.shape]
        for axis, extra in zip(growing, more, strict=True):
            if axis is not None and not (name == "bias" and axis == 2 and x.shape[2] == 1 and call.query.shape[1] != 1):
                widths[axis][1] = extra
        grown[name] = jnp.pad(x, widths, constant_values=-1 if name.endswith("_segment_ids") else 0)
    return dataclasses.replace(call, **grown)


def _entry(names: tuple[str, ...]) -> Any:
    return None if not names else names[0] if len(names) == 1 else names


def _entries(spec: P) -> tuple[tuple[str, ...], ...]:
    return tuple(axes.names(entry) for entry in (*spec, *[None] * (4 - len(spec))))
