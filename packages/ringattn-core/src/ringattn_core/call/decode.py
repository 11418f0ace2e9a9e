# SPDX-License-Identifier: Apache-2.0
"""The function `decode_attention`: a few new tokens attend to a cache of keys that is sharded over a ring."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int
from typing_extensions import TypedDict, Unpack

from ..backends.discovery import Registration
from ..backends.selection import select
from ..contract.call import Call
from ..errors import InputError, MeshError
from ..masks.int32 import as_int32
from ..placement import arrays, axes
from ..placement.arrays import Roles
from ..placement.layout import pieces
from ..placement.mesh import of_context
from ..placement.platforms import platform_of
from ..ring.decode import decode
from ..tuning.choice import with_parameters
from .attention import config_of
from .checks import Sizes
from .mesh_roles import check_mesh, named_roles, ranks_of, refuse_indivisible_axes
from .options import ARRAYS, DEFAULTS, OPTIONS, needs, refuse_unknown
from .shard_map import refuse_replicated, refuse_sharded
from .sharding import over_shards
from .validation import check_operands, refuse_shared_axes

Lengths = Int[jax.Array, " B"]


class DecodeOptions(TypedDict, total=False):
    """The keyword arguments of `decode_attention`; they mean what they mean in `ring_attention`."""

    sliding_window: int | tuple[int | None, int | None] | None
    chunk_size: int | None
    logits_soft_cap: float | None
    softmax_scale: float | None
    alibi_slopes: arrays.Slopes | None
    axis_name: axes.AxisName
    batch_axis_name: axes.AxisName
    head_axis_name: axes.AxisName
    layout: str
    precision: Any
    return_lse: bool


def decode_attention(
    query: arrays.Query,
    key_cache: arrays.Key,
    value_cache: arrays.Value,
    lengths: Lengths | int,
    softmax_aux: arrays.Sinks | arrays.SharedSinks | None = None,
    *,
    mesh: Any = None,
    backend: Any = None,
    cfg: Any = None,
    **options: Unpack[DecodeOptions],
) -> Any:
    """Causal attention of a few new tokens to a cache of keys and values that is sharded over a ring.

    No keys are sent: each rank attends to its own shard, and the ranks merge their partial results. Row `b` of the
    cache holds `lengths[b]` tokens, and the queries are the last of them, so write the keys and values of the new
    tokens to the cache first. Entries of the cache after these are masked out, but must be finite. A query with a
    negative position sees no key, and its output is 0.

    With `mesh`, arrays are global and the cache is split over `axis_name`. Inside your own `jax.shard_map`, the cache
    is this rank's shard; all other arrays and the result are the same on all ranks of the ring.

    Args:
        query: The queries of the new tokens, `[B, T, N, H]`.
        key_cache: `[B, S, K, H]`, in the order of `layout`.
        value_cache: `[B, S, K, Hv]`.
        lengths: How many tokens each row of the cache holds, the new ones included: `[B]`, or one integer.
        softmax_aux: Attention sinks, as in `ring_attention`.
        mesh: The mesh over which the call splits its global arrays.
        backend: The name of a backend, or several names to try in order.
        cfg: A `RingAttentionConfig`, or a dict of its fields.
        **options: `sliding_window`, `chunk_size`, `logits_soft_cap`, `softmax_scale`, `alibi_slopes`, `axis_name`,
            `batch_axis_name`, `head_axis_name`, `layout`, `precision` and `return_lse`, as in `ring_attention`.

    Returns:
        The output `[B, T, N, Hv]`. With `return_lse`, `(out, lse)` with `lse` `[B, N, T]` in float32.
    """
    refuse_unknown(options, DecodeOptions.__annotations__, "decode_attention")
    config = config_of(cfg)
    given = {**options, "softmax_aux": softmax_aux, "fwd_params": config.fwd_params, "bwd_params": config.bwd_params}
    call, lengths = _validated(query, key_cache, value_cache, lengths, mesh, given)
    tokens = call.query.shape[1]
    positions = lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)
    call = dataclasses.replace(call, q_positions=positions)
    wanted = config.backend_name if backend is None else backend
    registration = select(wanted, needs(call), platform_of(mesh, (call.query, call.key, call.value)))
    if registration.descriptor().kernel is None:
        raise InputError(
            "backend",
            f"{registration.name!r} drives the ring itself, and decode_attention needs a kernel of one block",
            "Pass another backend",
        )
    if mesh is not None:
        return _sharded(registration, call, of_context(mesh, call.query))
    _refuse_uneven_cache(call, 1)
    refuse_replicated(call, {"key_cache": call.key, "value_cache": call.value})
    refuse_sharded(call, {"query": call.query, "lengths": lengths})
    return _answer(registration, call)


def _validated(
    query: Any, key_cache: Any, value_cache: Any, lengths: Any, mesh: Any, given: dict[str, Any]
) -> tuple[Call, jax.Array]:
    """Checks the arguments. Returns the call in canonical form, without positions, and the length of each row."""
    given_arrays = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    operands = {name: arrays.as_array(name, x) for name, x in given_arrays.items()}
    check_operands(operands)
    q, k, v = operands.values()
    names = ("axis_name", "batch_axis_name", "head_axis_name")
    ring, batch, heads = (axes.names(given.get(name), name) for name in names)
    refuse_shared_axes(ring, batch, heads)
    ranks, head_ranks = 1, 1
    if mesh is None:
        ranks, head_ranks = axes.size("axis_name", ring), axes.size("head_axis_name", heads)
    total = k.shape[1] * ranks
    sizes = Sizes.of_operands(q, k, (q.shape[1], total), head_ranks, heads if mesh is None else ())
    values = DEFAULTS | given | {"causal": True}
    call = Call(query=q, key=k, value=v, **{x.name: x.canonical(values[x.name], sizes) for x in OPTIONS})
    remedy = f"Pass lengths from 0 to {total}, the number of tokens that the cache has room for"
    known = as_int32("lengths", lengths, (0, total, remedy))
    if known.shape not in ((), q.shape[:1]):
        raise InputError("lengths", f"has shape {known.shape}", f"Pass one integer, or {q.shape[0]}, one for each row")
    return call, jnp.broadcast_to(known, q.shape[:1])


def _refuse_uneven_cache(call: Call, ranks: int) -> None:
    """Raises unless the layout splits the cache evenly between the ranks. (Padding would copy the whole cache.)"""
    room, parts = call.key.shape[1], ranks * pieces(call.layout)
    if room % parts:
        raise InputError(
            "key_cache",
            f"has room for {room} tokens, which {call.layout!r} on {ranks} ranks cannot split into {parts}",
            f"Allocate {-(-room // parts) * parts}",
        )


def _answer(registration: Registration, call: Call) -> Any:
    """The result of the call on one rank, whose arrays are local."""
    out, lse = decode(registration.implementation(), with_parameters(registration, call))
    return (out, lse) if call.return_lse else out


def _sharded(registration: Registration, call: Call, mesh: Any) -> Any:
    """The result of the call on global arrays. Only the cache is split over the ring."""
    check_mesh(call, mesh)
    roles = named_roles(call, mesh)
    refuse_indivisible_axes(call, mesh, roles)
    parts = ranks_of(mesh, roles.heads)
    if call.key.shape[2] % parts:
        raise MeshError(
            f"key_cache has heads {call.key.shape[2]}, which the {parts} ranks of mesh axes {roles.heads} do not "
            f"divide. Pass head_axis_name=() to leave heads whole, or another mesh"
        )
    _refuse_uneven_cache(call, ranks_of(mesh, roles.sequence))
    whole = Roles(roles.batch, (), roles.heads)
    given = {name: x for name in ARRAYS if (x := getattr(call, name)) is not None}
    specs = {
        name: (roles if name in ("key", "value") else whole).spec(ARRAYS[name], x.shape) for name, x in given.items()
    }
    outputs = whole.spec(arrays.Output), whole.spec(arrays.LogSumExp)
    out, *lse = over_shards(_answer, registration, dataclasses.replace(call, **roles.names), mesh, specs, outputs)
    return (out, *lse) if lse else out
