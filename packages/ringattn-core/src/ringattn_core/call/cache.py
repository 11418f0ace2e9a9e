# SPDX-License-Identifier: Apache-2.0
"""Calls whose keys and values are a cache that is sharded over a ring, for decoding and for prefill."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int

from ..backends.discovery import Registration
from ..contract.call import Call
from ..errors import InputError
from ..masks.int32 import as_int32
from ..placement.layout import pieces, refuse_indivisible
from ..placement.platforms import refuse_different_devices
from ..ring import cache
from ..tuning.choice import with_parameters
from .mesh_roles import check_mesh, mesh_of, ranks_of
from .options import DEFAULTS, OPTIONS, CacheOptions, Options, configured, refuse_unknown
from .shard_map import refuse_sharded, refuse_unnamed_axes
from .validation import checked_operands

Lengths = Int[jax.Array, " B"]


def checked(
    function: Any, query: Any, key_cache: Any, value_cache: Any, lengths: Any, options: dict[str, Any], sharded: bool
) -> tuple[Call, Lengths, Any, Any]:
    """Checks the arguments of `function`, and makes the call in canonical form, without positions.

    Inside a `shard_map`, `sharded` says that queries are split over the ring like the cache; otherwise every rank has
    all of them. Returns the call; the position of each row's first query, which may be negative; the mesh, which is
    `None` where the arrays are local; and the backend asked for.
    """
    operands = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    mesh = options.pop("mesh")
    config, backend = configured(options)
    _refuse_unknown(function, options)
    given = {**options, "fwd_params": config.fwd_params, "bwd_params": config.bwd_params}
    mesh = mesh_of(mesh, options, operands.values())
    arrays, sizes = checked_operands(operands, given, None if mesh is None else 1, whole_queries=not sharded)
    (q, k, v), (tokens, room) = arrays.values(), sizes.lengths
    values = DEFAULTS | given | {"causal": True}
    call = Call(query=q, key=k, value=v, **{x.name: x.canonical(values[x.name], sizes) for x in OPTIONS})
    remedy = f"Pass lengths from 0 to {room}, the number of tokens that the cache has room for"
    if mesh is None:
        refuse_unnamed_axes(call)
    else:
        check_mesh(call, mesh)
    known = as_int32("lengths", lengths, (0, room, remedy))
    if known.shape not in ((), q.shape[:1]):
        raise InputError("lengths", f"has shape {known.shape}", f"Pass one integer, or {q.shape[0]}, one for each row")
    if mesh is not None:
        _refuse_uneven_cache(call, ranks_of(mesh, call.axis_name or ()))
    else:
        others = {name: x for name, x in call.arrays.items() if name not in ("query", "key", "value")}
        refuse_different_devices(arrays | {"lengths": known} | others)
        _check_shard(call, arrays, known, room // k.shape[1], sharded)
    return call, jnp.broadcast_to(known, q.shape[:1]) - tokens, mesh, backend


def attend(registration: Registration, call: Call) -> Any:
    """The result of a call on one rank whose keys stay where they are. The arrays are local."""
    if registration.descriptor().kernel is None:
        function = "decode_attention" if call.query_offset is None else "prefill_attention with send='queries'"
        raise InputError(
            "backend",
            f"{registration.name!r} drives the ring itself, and {function} needs a kernel of one block",
            "Pass another backend",
        )
    out, lse = cache.attend(registration.implementation(), with_parameters(registration, call))
    return (out, lse) if call.return_lse else out


def _refuse_unknown(function: Any, options: dict[str, Any]) -> None:
    """Raises for a keyword that the function does not take."""
    for name in ("causal", "is_causal"):
        if name in options:
            remedy = "Leave it out: attention to a cache is always causal"
            raise InputError(name, f"is not an argument of {function.__name__}", remedy)
    for name in options.keys() & {"bias", *Options.__annotations__} - CacheOptions.__annotations__.keys():
        remedy = "Leave it out, or call ring_attention with causal=True and query_offset=lengths - query.shape[1]"
        raise InputError(name, f"is not an argument of {function.__name__}", remedy)
    named = [name for name in function.__annotations__ if name not in ("options", "return")]
    refuse_unknown(options, (*named, *CacheOptions.__annotations__), function.__name__)


def _check_shard(call: Call, operands: dict[str, jax.Array], lengths: jax.Array, ranks: int, sharded: bool) -> None:
    """Raises if an array in a `shard_map` is split where it must be whole, or not split evenly."""
    _refuse_uneven_cache(call, 1)
    query = next(iter(operands))
    if sharded:
        refuse_indivisible(query, call.query.shape[1] * ranks, call.layout, ranks)
    refuse_sharded(call.axis_name or (), {"lengths": lengths} | ({} if sharded else {query: call.query}))


def _refuse_uneven_cache(call: Call, ranks: int) -> None:
    """Raises unless the layout splits the cache evenly between the ranks. (Padding would copy the whole cache.)"""
    room, parts = call.key.shape[1], ranks * pieces(call.layout)
    if room % parts:
        raise InputError(
            "key_cache",
            f"has room for {room} tokens, which {call.layout!r} on {ranks} ranks cannot split into {parts}",
            f"Allocate {-(-room // parts) * parts}",
        )
